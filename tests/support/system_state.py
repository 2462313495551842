"""What a test must leave as it was: devices, mounts, processes, files."""

import gc as garbage
import os
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from support import workers

from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.ublk_devices import list_ublk_devices
from btrfs_ublk.testing.settings import REQUIRE_VARIABLE

#: Backing files of FUSE servers' loop devices are called this and the tag.
SERVED_PREFIX = "/btrfs-ublk-"
#: How long a killed or orphaned process may take to end.
ORPHAN_TIMEOUT_S = 5.0
#: What daemons leave on purpose, and tokens that are shared, and killed snapshotters.
_KEPT = {("run", name) for name in ("daemon", "tokens", "snapshotter.lock")}
_GUARDIAN = " -m btrfs_ublk.testing.guardian "
#: Backing files of servers that others made: a tag is used once, and to look is slow.
_others: set[str] = set()


@dataclass(frozen=True)
class SystemState:
    """The state of the system that a test must not change."""

    loop_devices: dict[str, str]
    mounts: dict[str, str]
    ublk_devices: list[int]
    children: list[str]
    files: list[str]
    ledger_entries: list[str]
    open_files: int


def children(known: Collection[str] = ()) -> list[str]:
    """Return the living processes that tests have started, and their descendants.

    Wait for some time for those that are not ``known`` to end, as orphans may be about
    to. Zombies do not count, as their parents may not have asked for their status yet.
    Nor does the plugin's guardian, which stays as long as the session, nor a server's
    own process that asks others, nor the daemon's that answers, as long as those live.
    """
    deadline_s = time.monotonic() + ORPHAN_TIMEOUT_S
    while True:
        found = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                command = " ".join(child.cmdline())
                if child.status() == psutil.STATUS_ZOMBIE or _GUARDIAN in command:
                    continue
                parent = child.parent()
                owner = " ".join(parent.cmdline()) if parent else ""
                if command == "btrfs-ublk-fetch" and "btrfs-ublk-server" in owner:
                    continue
                if " btrfs_ublk.volume.answers " in command:
                    if " btrfs_ublk.daemon " in owner:
                        continue
                found.append(f"{child.pid} {command}")
        if set(found) <= set(known) or time.monotonic() > deadline_s:
            return found
        time.sleep(0.02)


def system_state(root: Path, known: Collection[str] = ()) -> SystemState:
    """Return the state as far as it is the tests' own, as others may use this machine:
    workers of the same run, for one. All mounts of a worker's own namespace count.
    With BTRFS_UBLK_REQUIRE=1 and without workers, all of the machine's state counts.
    ``known`` processes, which children() has returned, are not waited for.
    """
    garbage.collect()  # an error's traceback may still hold files open
    living = children(known)  # first: what these hold goes with them
    everything = os.environ.get(REQUIRE_VARIABLE) == "1" and not workers.ACTIVE
    loops = _loop_devices(root, everything)
    mounts = {
        str(mount.target): mount.source
        for mount in read_mountinfo()
        if everything
        or workers.ACTIVE
        or root in mount.target.parents
        or Path(mount.source).name in loops
    }
    return SystemState(
        loop_devices=loops,
        mounts=mounts,
        ublk_devices=[device.device_id for device in list_ublk_devices()],
        children=living,
        files=_files(root),
        ledger_entries=[str(entry) for entry in process_ledger().entries()],
        open_files=len(os.listdir("/proc/self/fd")),
    )


def state_after(root: Path, before: SystemState, known: Collection[str]) -> SystemState:
    """Return what is there after a test, when what others undo at any time is gone: a
    loop device that udev, say, still has open is detached when that closes it, and gRPC
    closes its four descriptors by a thread.
    """
    has_grpc = "grpc" in sys.modules
    deadline_s = time.monotonic() + ORPHAN_TIMEOUT_S
    while True:
        after = system_state(root, known)
        if (
            after.loop_devices == before.loop_devices
            and not (has_grpc and after.open_files > before.open_files)
        ) or time.monotonic() > deadline_s:
            return after
        time.sleep(0.05)


def _files(root: Path) -> list[str]:
    found = []
    for directory, folders, files in os.walk(root):
        inside = Path(directory).relative_to(root)
        # What tests leave in tmp_path is pytest's, and more with each test.
        folders[:] = [x for x in folders if not x.startswith("pytest-of-")]
        found += [inside / name for name in (*folders, *files)]
    return sorted(str(root / x) for x in found if x.parts[:2] not in _KEPT)


def _loop_devices(root: Path, everything: bool) -> dict[str, str]:
    loops = {}
    for link in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            backing = link.read_text().strip()
        except OSError:
            continue
        ours = everything or backing.startswith(str(root))
        if not ours and backing.startswith(SERVED_PREFIX) and backing not in _others:
            ours = _is_ours(backing.removeprefix(SERVED_PREFIX), root)
            if not ours:
                _others.add(backing)
        if ours:
            loops[link.parent.parent.name] = backing
    return loops


def _is_ours(tag: str, root: Path) -> bool:
    """Return whether these tests made a server's loop device: a ledger or a device's
    state of theirs names its tag from before it is made until it is gone, and a server
    has its owner's environment."""
    for pattern in ("state/*.ledger", "run/devices/*/device.json"):
        for file in root.glob(pattern):
            with suppress(OSError):
                if tag in file.read_text():
                    return True
    state = os.environ["BTRFS_UBLK_STATE_DIR"]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if tag in process.cmdline():
                return process.environ().get("BTRFS_UBLK_STATE_DIR") == state
    return False
