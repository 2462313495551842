"""Cuts the power of a disk with all that we keep on it, thousands of times.

``python tests/campaigns/power.py --help``. All of it is on one disk, which logs what is
written to it (disks.py): a plain btrfs, ext4 or xfs, and in it volumes with their
sprouts, maps and caches, the store of images, forks, and snapshots for containers. At
first, power_work.py uses them, and notes what was acknowledged when. Then states are
laid out that a loss of power may leave, at random moments, torn at any sector. In each,
the kernel mounts the disk as after a reboot; all that was acknowledged must be there,
nothing else may be wrong, and all goes on: volumes come up, and what is half-made goes.
All random choices follow from --seed.
"""

import hashlib
import os
import random
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import campaign
import click
from campaign import Run
from killable import btrfs_check
from power_work import (
    ANY,
    CONTAINERS,
    IMAGE,
    LAZY_BYTES,
    MAIN,
    UNIT_BYTES,
    VOLUMES,
    Key,
    Promises,
    Work,
    known,
    write_synced,
)
from support.disks import SECTOR, FileSystem, Replay, mounted_disk, recording
from support.images import tagged_image
from support.registry import REGISTRY, Registry, registry_server

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.private_dirs import VOLUMES_VARIABLE
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.bench import options
from btrfs_ublk.containers.snapshots import Snapshots
from btrfs_ublk.device.state import half_made
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.store import IMAGES_VARIABLE, ImageStore
from btrfs_ublk.units import GIB
from btrfs_ublk.volume import down_volume, forks_of_image, list_volumes, up_volume
from btrfs_ublk.volume.store import volume_directory

_DISK_BYTES = 4 * GIB
BOOT_ID = "/proc/sys/kernel/random/boot_id"
_TIMEOUT_S = 120.0
#: Of how many states one has its sprouts looked at by `btrfs check`.
_CHECKED_EVERY = 5
_LAYER_BYTES = 300_000
#: States in the order of their moments.
_PASS = 40
#: Of one state's values that are wrong.
_SHOWN = 3


class Campaign:
    """Everything is below ``top``; the disk is mounted at top/disk, in the states as
    when they were recorded, since definitions have absolute paths."""

    def __init__(
        self,
        top: Path,
        registry: Registry,
        *,
        kind: FileSystem,
        chances: random.Random,
        up_every: int,
    ) -> None:
        self._top, self._registry, self._kind = top, registry, kind
        self._up_every, self._chances = up_every, chances
        self._log = top / "log"
        for name in ("mounts", "source"):
            (top / name).mkdir()
        for name in ("same", "other"):
            content = self._chances.randbytes(LAZY_BYTES)
            (top / "source" / name).write_bytes(content)
        self._same = (top / "source/same").read_bytes()
        self._other = (top / "source/other").read_bytes()
        self._promises = Promises(lambda: self._log.stat().st_size)
        self._work = Work(
            *(top / "mounts", top / "source", registry),
            *(self._promises, self._chances),
        )

    def record(self, steps: int) -> None:
        """Do so many steps of work on a disk that logs."""
        self._make_images()
        with recording(self._top, self._kind, size_bytes=_DISK_BYTES):
            self._work.run(steps)
        # A unit that was read keeps its content, or cannot be read any more.
        with (self._top / "source/other").open("r+b") as file:
            file.write(bytes(255 - byte for byte in self._other))

    def _make_images(self) -> None:
        """Put two images into the registry, which may be pulled."""
        for tag in ("1", "2"):
            files = {
                "text": tag.encode(),
                "data": self._chances.randbytes(_LAYER_BYTES),
            }
            ordinary = tagged_image(self._top / f"ordinary-{tag}", files)
            layout = self._top / f"image-{tag}"
            self._image("build", ordinary, "-o", layout, "--tag", tag)
            name = f"{self._registry.host}/app:{tag}"
            ca = ("--ca-file", self._registry.ca_file)
            self._image("push", f"oci:{layout}:{tag}", name, *ca)
        (self._top / "etc/images.toml").write_text(
            f'[[allow]]\nfrom = "{self._registry.host}/*"\n'
        )

    def _image(self, *words: object) -> None:
        argv = [sys.executable, "-m", "btrfs_ublk.cli.main", "image"]
        run_program([*argv, *map(str, words)], timeout_s=_TIMEOUT_S)

    def states(self, count: int) -> Iterator[tuple[str, list[str]]]:
        """Yield what each state is, and what is wrong with it."""
        number = 0
        # In several passes, so that a limit of time does not leave the end out.
        while number < count:
            replay = Replay(
                *(self._top / "initial", self._log, self._top / "durable"),
                sector_bytes=SECTOR,
            )
            under_way = replay.under_way()
            size = min(_PASS, count - number)
            for cut in sorted(_cut(under_way, self._chances) for _ in range(size)):
                mode = self._chances.choice(["none", "all", "some", "some", "some"])
                replay.advance(cut)
                state = self._top / "state-now"
                replay.lay_out(state, mode, self._chances)
                position = replay.records[cut - 1].end if cut else 0
                what = f"{cut} of {len(replay.records)} writes, {mode} of "
                what += str(under_way[cut])
                yield what, self._look(state, position, number)
                number += 1

    def _look(self, disk: Path, position: int, number: int) -> list[str]:
        """Boot with this disk; return what is wrong."""
        with_check = number % (_CHECKED_EVERY * self._up_every) == 0
        boot = self._top / "boot_id"
        boot.write_text(f"{uuid.uuid4()}\n")
        problems: list[str] = []
        try:
            if with_check and self._kind == "btrfs":
                run_program(
                    ["btrfs", "check", "--readonly", disk], timeout_s=_TIMEOUT_S
                )
            with mounted_disk(disk, self._top / "disk", self._kind):
                try:
                    problems += self._compare(position)
                    if number % self._up_every == 0:
                        problems += self._go_on(position)
                        self._work_on()
                finally:
                    for each in list_volumes():
                        down_volume(each.name)
                # NB: `btrfs check` knows no simple quotas before 6.7; the volume with
                # the snapshots has them.
                for name in (MAIN, IMAGE) if with_check else ():
                    if said := btrfs_check(name):
                        problems.append(f"btrfs check of volume {name}: {said}")
                problems += self._left(number % self._up_every == 0)
        except (BtrfsUblkError, OSError) as error:
            problems.append(f"{type(error).__name__}: {error}")
        return problems

    def _compare(self, position: int) -> list[str]:
        """Compare what is on the disk, with nothing up."""
        found: dict[Key, Any] = {}
        for volume in list_volumes():
            if volume.state == "damaged":
                return [f"volume {volume.name} is damaged: {volume.reason}"]
            found["volume", volume.name] = True
            definition = volume_directory(volume.name).definition()
            found["writable", volume.name] = definition.writable_bytes
        problems = []
        for image in ImageStore().images():
            pack = hashlib.sha256(image.pack.read_bytes()).hexdigest()
            if f"sha256:{pack}" != ImageStore().manifest(image.digest).pack.digest:
                problems.append(f"image {image.names}: its pack is wrong")
            found |= {("image", name): True for name in image.names}
        return problems + self._wrong(position, found, "volume", "writable", "image")

    def _wrong(self, position: int, found: dict[Key, Any], *kinds: str) -> list[str]:
        """Compare values with those that are allowed."""
        problems = []
        for key, allowed in self._promises.allowed(position).items():
            value = known(found.get(key))
            if key[0] in kinds and value not in allowed and ANY not in allowed:
                problems.append(
                    f"{' '.join(key)}: {_shown(value)}, not "
                    f"{' or '.join(map(_shown, allowed))}"
                )
        return problems[:_SHOWN]

    def _go_on(self, position: int) -> list[str]:
        """Bring all volumes up, and compare what is in them."""
        names = {each.name for each in list_volumes()}
        for name in sorted(names | set(VOLUMES)):
            kept = volume_directory(name)
            definition = self._work.definition(name)
            up_volume(name, kept.definition() if name in names else definition)
        problems = self._compare_lazy(position, MAIN in names)
        found: dict[Key, Any] = {
            ("fork", IMAGE, fork.name): fork.mode for fork in forks_of_image(IMAGE)
        }
        for key in self._promises.allowed(position):
            if key[0] == "file":
                with suppress(FileNotFoundError, NotADirectoryError):
                    path = self._top / "mounts" / key[1] / key[2]
                    found[key] = path.read_bytes()
        root = self._top / "mounts" / CONTAINERS / "root"
        with closing(Snapshots(root)) as snapshots:
            for each in snapshots.store.find():
                found["snapshot", each.name] = each.kind.value
                directory = root / "snapshots" / str(each.id)
                found["mode", each.name] = directory.stat().st_mode & 0o7777
                if each.kind.value == "committed":
                    for path in directory.iterdir():
                        found["layer", each.name, path.name] = path.read_bytes()
                elif not snapshots.mounts(each.name):
                    problems.append(f"snapshot {each.name} has no mount")
            snapshots.cleanup()
        kinds = ("file", "fork", "snapshot", "mode", "layer")
        return problems + self._wrong(position, found, *kinds)

    def _work_on(self) -> None:
        with closing(Snapshots(self._top / "mounts" / CONTAINERS / "root")) as made:
            made.prepare("later", "", {})
            made.commit("later committed", "later", {})
        for name in VOLUMES:
            write_synced(self._top / "mounts" / name / "later", b"later")

    def _compare_lazy(self, position: int, was_there: bool) -> list[str]:
        main, problems = self._top / "mounts" / MAIN, []
        if (main / "same").read_bytes() != self._same:
            problems.append("the lazy file is wrong")
        allowed = self._promises.allowed(position)
        with (main / "other").open("rb") as file:
            for unit in range(LAZY_BYTES // UNIT_BYTES):
                if not was_there or allowed.get(("unit", str(unit)), [None]) != [True]:
                    continue
                at = unit * UNIT_BYTES
                file.seek(at)
                with suppress(OSError):
                    if file.read(UNIT_BYTES) != self._other[at : at + UNIT_BYTES]:
                        problems.append(f"unit {unit} has changed after it was read")
        return problems

    def _left(self, was_up: bool) -> list[str]:
        """Remove what is not used; nothing half-made may be left."""
        ImageStore().collect(())
        disk = self._top / "disk"
        halves = list((disk / "images").glob(".new-*"))
        if was_up:
            halves += half_made(disk / "volumes")
        return [f"is left: {each}" for each in halves]


def _cut(under_way: Sequence[int], chances: random.Random) -> int:
    """Choose a moment; rather one when much is under way."""
    tried = [chances.randrange(len(under_way)) for _ in range(chances.choice([1, 4]))]
    return max(tried, key=lambda cut: under_way[cut])


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)


@campaign.command(
    "power",
    click.option("--steps", type=campaign.COUNT, default=60, help="Of work, before."),
    click.option(
        "--file-system",
        "kind",
        type=click.Choice(["btrfs", "ext4", "xfs"]),
        default="btrfs",
        help="Of the disk.",
    ),
    click.option(
        "--up-every",
        type=campaign.COUNT,
        default=6,
        help="Of so many states one has its volumes brought up.",
    ),
    needs=(ROOT, BTRFS, LOOP, FUSE, REGISTRY),
    rounds=600,
    recorded=("steps", "kind", "up_every"),
)
def command(run: Run, steps: int, kind: FileSystem, up_every: int) -> None:
    """Cut the power of a disk at random moments, and start from what is left of it.

    Fails when anything that was acknowledged is missing or wrong, or does not go on.
    """
    if os.getpid() > 100:
        raise BtrfsUblkError("it changes /proc", hint="run it by scripts/torture")
    top, stack = run.directory, run.stack
    (top / "registry").mkdir()
    server = stack.enter_context(registry_server(top / "registry", tls=True))
    places = {VOLUMES_VARIABLE: "volumes", IMAGES_VARIABLE: "images"}
    on_disk = {name: str(top / "disk" / each) for name, each in places.items()}
    stack.enter_context(patch.dict(os.environ, on_disk))
    # Each state is that of another boot.
    (top / "boot_id").write_text(f"{uuid.uuid4()}\n")
    run_program(["mount", "--bind", top / "boot_id", BOOT_ID], timeout_s=_TIMEOUT_S)
    stack.callback(run_program, ["umount", BOOT_ID], timeout_s=_TIMEOUT_S)
    made = Campaign(top, server, kind=kind, chances=run.chances, up_every=up_every)
    made.record(steps)
    options.progress(f"recorded {steps} steps of work")
    for what, problems in made.states(run.rounds):
        run.add({"state": what, "problems": [f"after {what}: {x}" for x in problems]})
        options.progress(f"{run.done}: {what}: {'; '.join(problems) or 'fine'}")
        if not run.in_time():
            break


if __name__ == "__main__":
    run_command(command, name="power.py")
