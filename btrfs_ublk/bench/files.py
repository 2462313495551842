"""Making many files: a plan, and the helper processes that execute it."""

from __future__ import annotations

import ctypes
import json
import os
import time
from array import array
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from btrfs_ublk.base.helpers import MAKE_FILES, helper_path
from btrfs_ublk.base.process import Child, readable, spawn
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.bench.environment import watched
from btrfs_ublk.bench.stats import in_parts, latency_record, quantile
from btrfs_ublk.errors import BtrfsUblkError

Operation = Literal["clone", "write", "write-fsync"]

#: Few enough to keep a directory's index shallow, many enough that the time to make
#: directories is negligible.
FILES_PER_DIRECTORY = 10_000

#: struct plan_file of csrc/bench/make-files.c: source offset, size, latency.
_NUMBERS = 3
_ENTRY_BYTES = _NUMBERS * 8
#: This is a thousandth of the usual rate; slower counts as a hang.
_LEAST_RATE = 30
_LEAST_S = 60.0
_READY_TIMEOUT_S = 30.0
_PARTS = 10


@dataclass(frozen=True)
class PlannedFile:
    """One file to make: ``offset`` is in the source that it is cloned from."""

    number: int
    offset: int
    size: int


class Plan:
    """The files to make, in order. Each process makes an equal part."""

    def __init__(self, offsets: Iterable[int], sizes: Iterable[int]) -> None:
        self._offsets = array("Q", offsets)
        self._sizes = array("Q", sizes)
        if len(self._offsets) != len(self._sizes):
            raise ValueError("as many offsets as sizes")

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, number: int) -> PlannedFile:
        return PlannedFile(number, self._offsets[number], self._sizes[number])

    def sample(self, count: int) -> list[PlannedFile]:
        """Return ``count`` files, evenly spread, or all when there are fewer."""
        count = min(count, len(self))
        return [self[number * len(self) // count] for number in range(count)]

    def parts(self, processes: int) -> list[range]:
        """Return the numbers of the files that each process makes."""
        ends = [len(self) * number // processes for number in range(processes + 1)]
        return [range(begin, end) for begin, end in zip(ends, ends[1:])]

    def path(self, directory: Path, number: int, *, processes: int) -> Path:
        """Return where the helper puts a file: PROCESS/DIRECTORY/NUMBER."""
        for process, part in enumerate(self.parts(processes)):
            if number in part:
                inner = number - part.start
                folder = inner // FILES_PER_DIRECTORY
                return directory / str(process) / str(folder) / str(inner)
        raise IndexError(f"{len(self)} files have no number {number}")

    def to_bytes(self) -> bytes:
        """Return the helper's struct plan_file, in this machine's byte order."""
        cells = array("Q", bytes(_ENTRY_BYTES * len(self)))
        cells[0::_NUMBERS] = self._offsets
        cells[1::_NUMBERS] = self._sizes
        return cells.tobytes()


@dataclass(frozen=True)
class Outcome:
    """The cost of making the files, with the latency of each file of the plan."""

    latencies_ns: array[int]
    parts: Sequence[range]
    wall_s: float
    cpu_s: float
    #: How often the processes waited, and were preempted.
    waits: int
    preemptions: int
    #: See environment.watched().
    machine: dict[str, float]

    def record(self) -> dict[str, Any]:
        """Return a result: rates per second, latencies in microseconds, CPU."""
        count = len(self.latencies_ns)
        # All processes' first parts together, all second parts, ...
        tenths = zip(
            *(
                in_parts(self.latencies_ns[part.start : part.stop], parts=_PARTS)
                for part in self.parts
            )
        )
        return {
            "files": count,
            "processes": len(self.parts),
            "wall_s": self.wall_s,
            "rate": count / self.wall_s,
            # Unlike rates, medians hardly depend on other load.
            "p50_by_part_us": [
                quantile(sorted(chain(*tenth)), 0.5) / 1e3 for tenth in tenths
            ],
            "cpu_us": self.cpu_s * 1e6 / count,
            "waits": self.waits / count,
            "preemptions": self.preemptions,
            **latency_record(self.latencies_ns),
            **self.machine,
            # The kernel's own threads, and all other programs.
            "other_cores": max(
                0.0, self.machine["busy_cores"] - self.cpu_s / self.wall_s
            ),
        }


def make_files(
    directory: Path,
    plan: Plan,
    *,
    operation: Operation,
    processes: int = 1,
    sources: Sequence[Path] = (),
) -> Outcome:
    """Execute the plan in an empty directory, each process in its own subdirectory.

    ``sources``: for clones, the file of each process. Raises BtrfsUblkError when a
    process fails or hangs.
    """
    timeout_s = _LEAST_S + len(plan) / _LEAST_RATE
    parts = plan.parts(processes)
    with ExitStack() as stack:
        with deferred():
            memory = stack.enter_context(
                os.fdopen(os.memfd_create("plan", os.MFD_CLOEXEC), "w+b", buffering=0)
            )
            start_end, our_end = (
                stack.enter_context(os.fdopen(fd, mode, buffering=0))
                for fd, mode in zip(os.pipe(), ("rb", "wb"))
            )
        memory.write(plan.to_bytes())
        children: list[Child] = []
        for process, part in enumerate(parts):
            place = directory / str(process)
            place.mkdir()
            argv: list[str | Path] = [
                *(helper_path(MAKE_FILES), f"--directory={place}"),
                *(f"--files-per-directory={FILES_PER_DIRECTORY}",),
                *(f"--plan-fd={memory.fileno()}", f"--start-fd={start_end.fileno()}"),
                *(f"--first={part.start}", f"--count={len(part)}"),
            ]
            argv += [f"--source={sources[process]}"] if sources else []
            fds = [memory.fileno(), start_end.fileno()]
            spawned = spawn([*argv, operation], pipe_stdout=True, keep_open_fds=fds)
            children.append(stack.enter_context(spawned))
        for child in children:
            _wait_ready(child)
        with watched() as machine:
            our_end.write(bytes(processes))
            reports = _finish(children, timeout_s=timeout_s)
        memory.seek(0)
        cells = array("Q", memory.read())
    begin_ns = min(report["begin_ns"] for report in reports)
    return Outcome(
        latencies_ns=cells[2::_NUMBERS],
        parts=parts,
        wall_s=(max(report["end_ns"] for report in reports) - begin_ns) / 1e9,
        cpu_s=sum(report["cpu_us"] for report in reports) / 1e6,
        waits=sum(report["waits"] for report in reports),
        preemptions=sum(report["preemptions"] for report in reports),
        machine=machine,
    )


def _wait_ready(child: Child) -> None:
    assert child.stdout is not None
    ready = readable([child.stdout, child], timeout_s=_READY_TIMEOUT_S)
    if child.stdout.fileno() not in ready or child.stdout.readline() != "ready\n":
        raise BtrfsUblkError(child.failure("did not become ready"))


def _finish(children: Sequence[Child], *, timeout_s: float) -> list[dict[str, int]]:
    deadline_s = time.monotonic() + timeout_s
    reports = []
    for child in children:
        status = child.wait(max(0.0, deadline_s - time.monotonic()))
        if status != 0:
            what = f"exited with {status}" if status else f"ran {timeout_s:.0f} s"
            raise BtrfsUblkError(child.failure(what))
        assert child.stdout is not None
        reports.append(json.loads(child.stdout.read()))
    return reports


@deferred()
def sync_file_system(directory: Path) -> float:
    """Call syncfs(2), which Python lacks; returns the seconds it took."""
    library = ctypes.CDLL(None, use_errno=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        begin_s = time.monotonic()
        if library.syncfs(fd):
            number = ctypes.get_errno()
            raise BtrfsUblkError(f"syncfs {directory}: {os.strerror(number)}")
        return time.monotonic() - begin_s
    finally:
        os.close(fd)
