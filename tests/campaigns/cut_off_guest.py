"""What guests of cut_off.py do: look at their disk, and work until they are killed.

Argument: the device. All that campaigns/power.py does is done once with a new file
system, so that all is loaded; then the guest says that it is ready, and its state is
saved. From there each round goes on, with a line of JSON on standard input: ``seed``,
``boot_id``, ``kind`` of file system, ``number`` above which names are new, ``random``
bytes, and ``events``, what was promised before. Standard output has a line for what was
found ("found", "problems"), and then for the begin ("begun") and end ("done") of all
that is promised.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import random
import struct
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import campaign
from power import BOOT_ID, Campaign
from power_work import IMAGE, MAIN, Event, Key, Promises, known
from support.registry import registry_server

from btrfs_ublk.base.capabilities import UBLK, require
from btrfs_ublk.base.private_dirs import VOLUMES_VARIABLE
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.store import IMAGES_VARIABLE, ImageStore
from btrfs_ublk.kernel import mounted
from btrfs_ublk.volume import down_volume, list_volumes
from btrfs_ublk.volume.store import volume_directory

_TOP = Path("/run/cut-off")
_DISK = _TOP / "disk"
#: Of all states of this kind, as nothing in it is of a position in a log.
_NOW = 1
_ENDLESS = 1 << 60
#: linux/random.h, linux/fs.h.
_RNDADDENTROPY, _RNDRESEEDCRNG, _BLKFLSBUF = 0x40085203, 0x5207, 0x1261


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


class _Told(Promises):
    """Promises that the host hears of before and after."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__(lambda: _NOW, events)
        self._numbers = count()

    @contextmanager
    def event(self, values: dict[Key, Any], *, whole: bool = True) -> Iterator[None]:
        values = {key: known(value) for key, value in values.items()}
        number = next(self._numbers)
        _say(begun=number, values=list(values.items()), whole=whole)
        yield
        _say(done=number)
        self.now |= values


def _begin_anew(made: Campaign, asked: dict[str, Any]) -> None:
    """Become another boot of the same machine, with other random numbers."""
    with open("/dev/random", "wb") as device:
        data = base64.b64decode(asked["random"])
        entropy = struct.pack("=ii", 8 * len(data), len(data)) + data
        fcntl.ioctl(device, _RNDADDENTROPY, entropy)
        fcntl.ioctl(device, _RNDRESEEDCRNG)
    (_TOP / "boot_id").write_text(f"{asked['boot_id']}\n")


def _look(made: Campaign, promises: _Told) -> list[str]:
    """Return what is wrong with the disk; all volumes are up after it."""
    allowed = promises.allowed(_NOW)
    there = [x for x in (MAIN, IMAGE) if set(allowed.get(("volume", x), ())) == {True}]
    problems = made.compare(_NOW)
    if not problems:
        problems += made.check_sprouts(there)
        problems += made.go_on(_NOW) + made.left(True)
    os.sync()
    promises.now |= made.found
    images = {name for image in ImageStore().images() for name in image.names}
    for key in promises.now:
        if key[0] == "image" and key[1] not in images:
            promises.now[key] = None  # it was removed, as nobody uses it
    promises.now |= {k: True for k, v in allowed.items() if k[0] == "unit" and all(v)}
    return problems


def _round(made: Campaign, device: str, asked: dict[str, Any]) -> None:
    _begin_anew(made, asked)
    with open(device, "rb") as disk:
        fcntl.ioctl(disk, _BLKFLSBUF)
    events = [
        Event(begun, done, {tuple(key): value for key, value in values}, whole)
        for begun, done, values, whole in asked["events"]
    ]
    promises, problems = _Told(events), list[str]()
    work = made.begin(promises, random.Random(asked["seed"]))
    work.trees = _DISK / "trees"
    with mounted(device, _DISK, fs_type=asked["kind"]):
        if events:
            try:
                problems = _look(made, promises)
            except (BtrfsUblkError, OSError) as error:
                problems = [f"{type(error).__name__}: {error}"]
        _say(problems=problems, found=list(promises.now.items()))
        if problems:
            return
        work.trees.mkdir(exist_ok=True)
        os.sync()
        found = {x.name: volume_directory(x.name).definition() for x in list_volumes()}
        work.go_on(found, number=asked["number"])
        try:
            work.run(_ENDLESS, each_first=False)
        except (BtrfsUblkError, OSError) as error:
            _say(problems=[f"{type(error).__name__}: {error}"])


def main(device: str) -> None:
    require(UBLK)
    _TOP.mkdir()
    with ExitStack() as stack:
        for name in ("registry", "disk"):
            (_TOP / name).mkdir()
        server = stack.enter_context(registry_server(_TOP / "registry", tls=True))
        stack.enter_context(campaign.apart(_TOP))
        places = {VOLUMES_VARIABLE: "volumes", IMAGES_VARIABLE: "images"}
        stack.enter_context(
            campaign.environment(**{x: str(_DISK / y) for x, y in places.items()})
        )
        (_TOP / "boot_id").write_text(f"{uuid.uuid4()}\n")
        run(["mount", "--bind", _TOP / "boot_id", BOOT_ID], timeout_s=60)
        made = Campaign(_TOP, server, kind="btrfs", seed=1)
        made.make_images()
        cache = Path(f"/sys/block/{Path(device).name}/queue/write_cache").read_text()
        if cache != "write back\n":
            raise BtrfsUblkError(f"the disk has no cache that can be lost: {cache}")
        # Once all of it, so that it has been read and imported.
        with mounted(device, _DISK, fs_type="btrfs"):
            made.begin(Promises(lambda: _NOW), random.Random(1)).run(17)
            made.check_sprouts([MAIN])
            made.compare(_NOW)
            made.go_on(_NOW)
            for each in list_volumes():
                down_volume(each.name)
        _say(ready=True)
        _round(made, device, json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    main(sys.argv[1])
