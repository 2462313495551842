"""Making many files: a plan, and the helper processes that execute it."""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from btrfs_ublk.base.helpers import MAKE_FILES, helper_path
from btrfs_ublk.base.process import Child, readable, spawn
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.bench.environment import watched
from btrfs_ublk.bench.report import Result
from btrfs_ublk.bench.stats import latency_record
from btrfs_ublk.errors import BtrfsUblkError

#: Few enough to keep a directory's index shallow, many enough that the time to make
#: directories is negligible.
FILES_PER_DIRECTORY = 10_000

#: struct plan_file of csrc/bench/make-files.c: source offset, size, latency.
_NUMBERS = 3
#: This is a thousandth of the usual rate; slower counts as a hang.
_LEAST_RATE = 30
_LEAST_S = 60.0
_READY_TIMEOUT_S = 30.0


class PlannedFile(NamedTuple):
    """One file to make: ``offset`` is in the source that it is cloned from."""

    number: int
    offset: int
    size: int


class Plan:
    """The files to make, in order. Each process makes an equal part."""

    def __init__(self, offsets: Iterable[int], sizes: Iterable[int]) -> None:
        self._offsets = array("Q", offsets)
        self._sizes = array("Q", sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def sample(self, count: int) -> list[PlannedFile]:
        """Return ``count`` files, evenly spread, or all when there are fewer."""
        count = min(count, len(self))
        numbers = [number * len(self) // count for number in range(count)]
        return [PlannedFile(x, self._offsets[x], self._sizes[x]) for x in numbers]

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
        cells = array("Q", bytes(8 * _NUMBERS * len(self)))
        cells[0::_NUMBERS] = self._offsets
        cells[1::_NUMBERS] = self._sizes
        return cells.tobytes()


def make_files(
    directory: Path,
    plan: Plan,
    *,
    operation: str = "clone",
    processes: int = 1,
    sources: Sequence[Path] = (),
) -> Result:
    """Execute the plan in an empty directory, each process in its own subdirectory.
    Returns the rate per second, latencies in microseconds, and the use of CPUs.

    ``sources``: for clones, the file of each process. Raises BtrfsUblkError when a
    process fails or hangs.
    """
    timeout_s = _LEAST_S + len(plan) / _LEAST_RATE
    parts = plan.parts(len(sources) or processes)
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
            our_end.write(bytes(len(parts)))
            reports = _finish(children, timeout_s=timeout_s)
        memory.seek(0)
        latencies_ns = array("Q", memory.read())[2::_NUMBERS]
    begin_ns = min(report["begin_ns"] for report in reports)
    wall_s = (max(report["end_ns"] for report in reports) - begin_ns) / 1e9
    cpu_s = sum(report["cpu_us"] for report in reports) / 1e6
    return {
        "files": len(plan),
        "processes": len(parts),
        "wall_s": wall_s,
        "rate": len(plan) / wall_s,
        "cpu_us": cpu_s * 1e6 / len(plan),
        **latency_record(latencies_ns),
        **machine,
        # The kernel's own threads, and all other programs.
        "other_cores": max(0.0, machine["busy_cores"] - cpu_s / wall_s),
    }


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
