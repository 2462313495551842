"""CPU use between two moments: by named processes, the kernel, and all others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# More than any of these files has. NB: Python allocates that much for each read.
_PROCESS_BYTES = 4 << 10
_STAT_BYTES = 1 << 20
#: linux/sched.h
_PF_KTHREAD = 0x00200000

#: The fields of a line "cpu" in /proc/stat (proc_stat(5)).
_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
#: NB: where the kernel stops the tick of idle CPUs, it measures these fields, and only
#: samples the others at each tick. So busy time is computed from these.
_NOT_BUSY = ("idle", "iowait", "steal")


@dataclass(frozen=True)
class Process:
    """CPU times in seconds: of all its threads together, and of the children that it
    has waited for.
    """

    parent: int
    is_kernel_thread: bool
    own_s: float
    children_s: float


@dataclass(frozen=True)
class Snapshot:
    """CPU times since boot, in seconds."""

    time_s: float
    cpu_count: int
    cpus: Mapping[str, float]
    processes: Mapping[int, Process]


@dataclass(frozen=True)
class RawSnapshot:
    """The kernel's texts; call ``parse()`` after the measurement.

    NB: in an emulated guest, looking at all processes takes Python a noticeable share
    of a short measurement, and parsing is most of that.
    """

    times_s: tuple[float, float]
    cpus: tuple[bytes, bytes]
    processes: Mapping[int, bytes]

    @classmethod
    def take(cls) -> RawSnapshot:
        begin_s, before = time.monotonic(), _read("/proc/stat", _STAT_BYTES)
        processes = {
            int(name): stat
            for name in os.listdir("/proc")
            if name.isdigit() and (stat := _read(f"/proc/{name}/stat"))
        }
        end_s, after = time.monotonic(), _read("/proc/stat", _STAT_BYTES)
        return cls((begin_s, end_s), (before, after), processes)

    def parse(self) -> Snapshot:
        # On a busy machine, looking at the processes takes a while. The CPUs' times are
        # taken for the middle of it.
        before, after = map(_cpu_times, self.cpus)
        return Snapshot(
            time_s=sum(self.times_s) / 2,
            cpu_count=os.sysconf("SC_NPROCESSORS_ONLN"),
            cpus={name: (before[name] + after[name]) / 2 for name in before},
            processes={pid: _process(stat) for pid, stat in self.processes.items()},
        )


def _read(path: str, most_bytes: int = _PROCESS_BYTES) -> bytes:
    """Read a file; empty if it is not there, as when a process has ended."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(fd, most_bytes)
    except OSError:
        return b""
    finally:
        os.close(fd)


def children_of(pid: int) -> set[int]:
    """Return the child processes; an empty set when the process has ended."""
    tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
    if not tasks:  # a kernel without CONFIG_PROC_CHILDREN
        processes = RawSnapshot.take().parse().processes
        return {child for child, one in processes.items() if one.parent == pid}
    found: set[int] = set()
    for path in tasks:
        with suppress(OSError):
            found |= set(map(int, path.read_text().split()))
    return found


def _cpu_times(stat: bytes) -> dict[str, float]:
    """Return the times of all CPUs together, from /proc/stat."""
    ticks = map(int, stat.partition(b"\n")[0].split()[1:])
    return {name: count / _TICKS_PER_S for name, count in zip(_FIELDS, ticks)}


def _process(stat: bytes) -> Process:
    # The command name may contain blanks and parentheses; field 3 follows it.
    fields = stat.rpartition(b")")[2].split(maxsplit=15)
    utime, stime, cutime, cstime = map(int, fields[11:15])
    return Process(
        parent=int(fields[1]),
        is_kernel_thread=bool(int(fields[6]) & _PF_KTHREAD),
        own_s=(utime + stime) / _TICKS_PER_S,
        children_s=(cutime + cstime) / _TICKS_PER_S,
    )


@dataclass(frozen=True)
class Usage:
    """CPU use between two snapshots; ``parts`` are processes by name."""

    before: Snapshot
    after: Snapshot
    parts: Mapping[str, Iterable[int]]

    @property
    def window_s(self) -> float:
        return self.after.time_s - self.before.time_s

    def _cpus(self, *names: str) -> float:
        used_s = sum(
            self.after.cpus.get(name, 0.0) - self.before.cpus.get(name, 0.0)
            for name in names
        )
        return used_s / self.window_s

    def _own(self, pids: Iterable[int]) -> float:
        used_s = sum(
            self.after.processes[pid].own_s - self.before.processes[pid].own_s
            for pid in pids
            if pid in self.after.processes and pid in self.before.processes
        )
        return used_s / self.window_s

    def _everything(self) -> float:
        """Return the cores of all processes, with those ended and reaped since. Of a
        kernel thread that has ended, nobody keeps the time."""
        sums_s = [
            sum(
                one.own_s + one.children_s
                for pid, one in snapshot.processes.items()
                if not one.is_kernel_thread or pid in self.after.processes
            )
            for snapshot in (self.before, self.after)
        ]
        return (sums_s[1] - sums_s[0]) / self.window_s

    def record(self) -> dict[str, float]:
        """Return the average cores in use: "total", each part, "rest" (the total
        without the parts), and parts of the rest: "kernel_threads", "other" processes,
        "interrupts" (sampled). "steal" is not in the total.

        "accounted" checks the counters of the CPUs, which give the total, against those
        of the processes: it is the sum of all processes and kernel threads as a share
        of the total. It is near 1 in a window that is much longer than a tick. Whether
        processes' times include interrupts depends on the kernel's configuration
        (CONFIG_IRQ_TIME_ACCOUNTING), so the value nearer to 1 is taken.
        """
        total = self.after.cpu_count - self._cpus(*_NOT_BUSY)
        parts = {name: self._own(pids) for name, pids in self.parts.items()}
        threads = {
            pid
            for pid, process in self.after.processes.items()
            if process.is_kernel_thread
        }
        kernel_threads = self._own(threads)
        everything = self._everything()
        interrupts = self._cpus("irq", "softirq")
        sums = (everything, everything + interrupts)
        return {
            "total": total,
            **parts,
            "rest": total - sum(parts.values()),
            "kernel_threads": kernel_threads,
            "other": max(0.0, everything - kernel_threads - sum(parts.values())),
            "interrupts": interrupts,
            "steal": self._cpus("steal"),
            "accounted": (
                min((each / total for each in sums), key=lambda share: abs(share - 1))
                if total
                else 1.0
            ),
        }
