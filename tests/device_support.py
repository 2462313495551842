"""Devices that outlive their servers: commands, deaths, reads that verify."""

from __future__ import annotations

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

from btrfs_ublk.device import (
    Device,
    DeviceState,
    collect_devices,
    list_devices,
    remove_device,
    show_device,
)
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.device.watch import wait_for_change
from btrfs_ublk.process import ProcessIdentity
from btrfs_ublk.readers import read_direct
from btrfs_ublk.server import Description, PatternSegment, Segment
from btrfs_ublk.units import MIB

SIZE = 64 * MIB
PATTERN = PatternSegment(offset=0, length=SIZE)
DESCRIPTION = Description(SIZE, [PATTERN])

#: For a server or supervisor to be replaced, in an emulated machine that is busy.
TIMEOUT_S = 240.0
#: Between two reads of a thread: others are to get a turn.
_PAUSE_S = 0.002


def device_command(
    *arguments: str | Path, timeout_s: float = 400
) -> subprocess.CompletedProcess[str]:
    """``btrfs-ublk device …``"""
    return subprocess.run(
        [sys.executable, "-m", "btrfs_ublk.cli.main", "device", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def map_command(
    *arguments: str | Path, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """``btrfs-ublk map …``"""
    return subprocess.run(
        [sys.executable, "-m", "btrfs_ublk.cli.main", "map", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def answer(*arguments: str | Path) -> Any:
    """What the command prints as JSON, whatever its exit status."""
    done = device_command(*arguments, "--json")
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def description_file(directory: Path, description: Description = DESCRIPTION) -> Path:
    path = directory / "description.json"
    path.write_text(description.to_json())
    return path


def wait_for(
    name: str,
    condition: Callable[[DeviceState], bool],
    *,
    timeout_s: float = TIMEOUT_S,
) -> DeviceState:
    """The device's first state that fulfils the condition."""
    directory = device_directory(name)
    seen: list[DeviceState] = []

    def fulfilled() -> DeviceState | None:
        seen[:] = [directory.state()]
        return seen[0] if condition(seen[0]) else None

    state = wait_for_change(directory.path, fulfilled, timeout_s=timeout_s)
    assert state is not None, f"{seen}\n{directory.log.read_text()}"
    return state


def kill(process: ProcessIdentity | None, signum: signal.Signals) -> None:
    assert process is not None and process.is_alive()
    os.kill(process.pid, signum)


def kill_server(name: str, signum: signal.Signals = signal.SIGKILL) -> DeviceState:
    """Returns the state with the next server."""
    before = show_device(name).state
    kill(before.server, signum)
    return wait_for(
        name, lambda state: state.status == "serving" and state.server != before.server
    )


def kill_supervisor(name: str) -> ProcessIdentity:
    supervisor = show_device(name).state.supervisor
    assert supervisor is not None
    kill(supervisor, signal.SIGKILL)
    assert supervisor.wait(timeout_s=10)
    return supervisor


def check_content(path: Path, segment: Segment = PATTERN, *, parts: int = 8) -> None:
    """Reads at random places, past the page cache, return what they must."""
    places = random.Random(str(path))
    for _ in range(parts):
        offset = places.randrange(segment.length // 4096 - 16) * 4096
        assert read_direct(path, offset, 65536) == segment.content(
            segment.offset + offset, 65536
        )


class Readers:
    """Threads that read and verify without end; made by reading()."""

    def __init__(self, path: Path, segment: Segment, *, threads: int) -> None:
        self._path = path
        self._segment = segment
        self._stop = threading.Event()
        self.wrong = 0
        self.errors: list[OSError] = []
        self.reads = 0
        #: The longest that one read took.
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
        """Until so many more have been answered."""
        target = self.reads + count
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.reads < target:
            assert time.monotonic() < deadline_s, f"{self.reads} reads, then none"
            time.sleep(0.005)

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
    """What a failed test has left would make all that follow fail."""
    for device in list_devices():
        remove_device(device.name, timeout_s=10)
    collect_devices()


@contextmanager
def reading(
    path: Path, segment: Segment = PATTERN, *, threads: int = 2
) -> Iterator[Readers]:
    """Verified reads of ``path``, which holds ``segment``, go on inside the block."""
    readers = Readers(path, segment, threads=threads)
    readers.start()
    try:
        readers.wait_for_reads(10)
        yield readers
    finally:
        readers.stop()


def is_lossless(device: Device) -> bool:
    """Whether reads in flight survive the death of a server."""
    return device.state.ready.get("recovery") == "reissue"
