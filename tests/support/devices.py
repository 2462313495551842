"""Devices that outlive their servers: commands, kills, reads, maps, and ledgers."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.processes import freeze
from support.waiting import wait_until

from btrfs_ublk.base import ledger as module
from btrfs_ublk.base.process import ProcessIdentity, run
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.content import Source
from btrfs_ublk.device import (
    Device,
    DeviceState,
    collect_devices,
    list_devices,
    remove_device,
    show_device,
)
from btrfs_ublk.device.inotify import wait_for_change
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.kernel import loop_device, mounted, tempdir
from btrfs_ublk.kernel.waiting import wait_until as wait_until_event
from btrfs_ublk.seed import Seed, make_seed
from btrfs_ublk.server import Description, LazySegment, PatternSegment, Segment
from btrfs_ublk.units import GIB, KIB, MIB

SIZE = 64 * MIB
PATTERN = PatternSegment(offset=0, length=SIZE)
DESCRIPTION = Description(SIZE, [PATTERN])

#: Time for a server or supervisor to be replaced, in a busy, emulated machine.
TIMEOUT_S = 240.0
#: Pause between two reads of a thread, so that others get a turn.
_PAUSE_S = 0.002


def any_command(
    *arguments: str | Path, stdin: str | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run ``btrfs-ublk …``."""
    return subprocess.run(
        [sys.executable, "-m", "btrfs_ublk.cli.main", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def device_command(
    *arguments: str | Path, timeout_s: float = 400
) -> subprocess.CompletedProcess[str]:
    """Run ``btrfs-ublk device …``."""
    return any_command("device", *arguments, timeout_s=timeout_s)


def map_command(
    *arguments: str | Path, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``btrfs-ublk map …``."""
    return any_command("map", *arguments, stdin=stdin)


def answer(*arguments: str | Path) -> Any:
    """Return the JSON that a device command prints, whatever its exit status."""
    done = device_command(*arguments, "--json")
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def description_file(directory: Path, description: Description = DESCRIPTION) -> Path:
    path = directory / "description.json"
    path.write_text(description.to_json())
    return path


def wait_for(
    name: str, condition: Callable[[DeviceState], bool], *, timeout_s: float = TIMEOUT_S
) -> DeviceState:
    """Wait until the device's state fulfils the condition, and return that state."""
    directory = device_directory(name)
    seen: list[DeviceState] = []

    def fulfilled() -> DeviceState | None:
        seen[:] = [directory.state()]
        return seen[0] if condition(seen[0]) else None

    state = wait_for_change(directory.path, fulfilled, timeout_s=timeout_s)
    assert state is not None, f"{seen}\n{directory.log.read_text()}"
    return state


def kill(process: ProcessIdentity | None, signum: signal.Signals) -> None:
    """Send the signal; with SIGSTOP, wait until all threads have stopped."""
    assert process is not None and process.is_alive()
    if signum == signal.SIGSTOP:
        freeze(process.pid)
    else:
        os.kill(process.pid, signum)


def kill_server(name: str, signum: signal.Signals = signal.SIGKILL) -> DeviceState:
    """Kill the server, and return the state when the next one serves."""
    before = show_device(name).state
    kill(before.server, signum)
    return wait_for(
        name, lambda state: state.status == "serving" and state.server != before.server
    )


def kill_keepers(name: str) -> None:
    """Kill the keepers, and wait for their ends: until then one counts as alive."""
    keepers = [keeper.process for keeper in show_device(name).state.keepers]
    for keeper in keepers:
        kill(keeper, signal.SIGKILL)
    for keeper in keepers:
        assert keeper.wait(timeout_s=TIMEOUT_S)


def kill_supervisor(name: str) -> ProcessIdentity:
    """Kill the supervisor, and its keepers, which would start another one."""
    supervisor = show_device(name).state.supervisor
    assert supervisor is not None
    kill(supervisor, signal.SIGSTOP)  # otherwise it would start another keeper
    kill_keepers(name)
    kill(supervisor, signal.SIGKILL)
    assert supervisor.wait(timeout_s=TIMEOUT_S)
    return supervisor


def processes(state: DeviceState) -> dict[str, ProcessIdentity]:
    assert state.server and state.supervisor
    (keeper,) = state.keepers
    return {
        "server": state.server,
        "supervisor": state.supervisor,
        "keeper": keeper.process,
    }


def is_whole(state: DeviceState) -> bool:
    """Return whether server, supervisor and one keeper run."""
    return (
        state.status == "serving"
        and len(state.keepers) == 1
        and all(process.is_alive() for process in processes(state).values())
    )


def kill_those(who: tuple[str, ...], *, name: str = "one") -> None:
    """Kill these processes at the same time."""
    found = processes(wait_for(name, is_whole))
    killed = [found[kind] for kind in who]
    for process in killed:
        kill(process, signal.SIGSTOP)  # none notices the end of another
    for process in killed:
        os.kill(process.pid, signal.SIGKILL)
    for process in killed:
        assert process.wait(timeout_s=TIMEOUT_S)


def check_content(path: Path, segment: Segment = PATTERN, *, parts: int = 8) -> None:
    """Check reads at random places, which bypass the page cache."""
    places = random.Random(str(path))
    for _ in range(parts):
        offset = places.randrange(segment.length // 4096 - 16) * 4096
        assert read_direct(path, offset, 65536) == segment.content(
            segment.offset + offset, 65536
        )


class Readers:
    """Threads that read and verify until stop(); see reading()."""

    def __init__(self, path: Path, segment: Segment, *, threads: int) -> None:
        self._path = path
        self._segment = segment
        self._stop = threading.Event()
        self.wrong = 0
        self.errors: list[OSError] = []
        self.reads = 0
        #: How long the slowest read took.
        self.longest_s = 0.0
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a read hangs"

    def wait_for_reads(self, count: int) -> None:
        """Wait until ``count`` more reads have been answered."""
        target = self.reads + count
        wait_until(
            lambda: self.reads >= target, lambda: f"{self.reads} reads, then none"
        )

    def _run(self, seed: int) -> None:
        places = random.Random(seed)
        blocks = self._segment.length // 4096
        while not self._stop.is_set():
            count = places.choice([1, 1, 4, 16])
            offset = places.randrange(blocks - count) * 4096
            expected = self._segment.content(
                self._segment.offset + offset, count * 4096
            )
            start_s = time.monotonic()
            try:
                if read_direct(self._path, offset, count * 4096) != expected:
                    self.wrong += 1
            except OSError as error:
                self.errors.append(error)
            self.longest_s = max(self.longest_s, time.monotonic() - start_s)
            self.reads += 1
            time.sleep(_PAUSE_S)


def remove_all() -> None:
    """Remove all devices. One that a failed test has left would make others fail."""
    for device in list_devices():
        remove_device(device.name, timeout_s=60)
    collect_devices()


@contextmanager
def reading(
    path: Path, segment: Segment = PATTERN, *, threads: int = 2
) -> Iterator[Readers]:
    """Verify reads of ``path``, which holds ``segment``, until the block ends."""
    readers = Readers(path, segment, threads=threads)
    readers.start()
    try:
        readers.wait_for_reads(10)
        yield readers
    finally:
        readers.stop()


def is_lossless(device: Device) -> bool:
    """Return whether reads in flight survive the death of a server."""
    return device.state.ready.get("recovery") == "reissue"


MAP_BYTES = GIB
MAP_UNIT = 64 * KIB
MEMSET: Source = {"kind": "memset", "size": GIB, "byte": 97}
MAP_PATTERN: Source = {"kind": "pattern", "size": GIB}


def map_description(tmp_path: Path, *, cached: bool = True) -> Description:
    cache = str(tmp_path / "cache") if cached else None
    segment = LazySegment(
        offset=0,
        length=MAP_BYTES,
        map=str(tmp_path / "it.map"),
        cache=cache,
        deadline_s=5,
    )
    return Description(MAP_BYTES, [segment])


def backing_of(path: Path) -> str | None:
    file = Path("/sys/block") / path.name / "loop/backing_file"
    return file.read_text().strip() if file.exists() else None


def detach(path: Path) -> None:
    """Detach it and wait for that. losetup(8) does not while udev, say, has it open."""
    run(["losetup", "-d", path], timeout_s=30)
    wait_until_event(
        lambda: backing_of(path) is None, timeout_s=30, what="still attached"
    )


def attach_again(path: Path, image: Path, *options: str) -> None:
    """Attach a file to the loop device that was just detached. Another test may have
    taken its number meanwhile, and has it for a while."""
    argv = ["losetup", *options, path, image]
    wait_until(lambda: subprocess.run(argv, stderr=subprocess.DEVNULL).returncode == 0)


def small_seed(directory: Path) -> tuple[Seed, Path]:
    """Make a seed of 64 MiB of virtual data, and a directory to mount it at."""
    path, target = directory / "seed", directory / "mnt"
    target.mkdir()
    return make_seed(path, virtual_data_size=64 * MIB, metadata_only=True), target


@contextmanager
def new_btrfs(parent: Path, *, size_bytes: int) -> Iterator[Path]:
    """Yield the mount point of an empty btrfs, whose image is below ``parent``."""
    with tempdir(parent=parent) as directory:
        target = directory / "mnt"
        target.mkdir()
        image = directory / "image"
        with image.open("wb") as file:
            file.truncate(size_bytes)
        run(["mkfs.btrfs", "-q", image], timeout_s=60)
        with loop_device(image) as device, mounted(device.path, target) as mount:
            yield mount.target


def fill(directory: Path) -> Path:
    """The file that takes all the room that is left."""
    path = directory / "hog"
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
                return path


def abandon(directory: Path, *records: dict[str, object], tail: str = "") -> Path:
    """A ledger as a dead process leaves it."""
    path = directory / "1-dead.ledger"
    header = {"version": 1, "boot_id": module.boot_id(), "pid": 1, "start_ticks": 0}
    text = "".join(json.dumps(record) + "\n" for record in [header, *records])
    path.write_text(text + tail)
    return path


def enter(
    sequence: int, name: str, kind: str = "thing", **more: object
) -> dict[str, object]:
    details = {"name": name, **more}
    return {"enter": sequence, "kind": kind, "tag": "0" * 16, "details": details}
