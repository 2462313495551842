"""CPU use between two moments: by named processes, the kernel, and all others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
    context_switches: int
    processes: Mapping[int, Process]
    #: Voluntary and involuntary switches of the processes that were asked for.
    switches_of: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RawSnapshot:
    """The kernel's texts; call ``parse()`` after the measurement.

    NB: in an emulated guest, looking at all processes takes Python a noticeable share
    of a short measurement, and parsing is most of that.
    """

    times_s: tuple[float, float]
    cpus: tuple[bytes, bytes]
    processes: Mapping[int, bytes]
    statuses: Mapping[int, Sequence[bytes]]

    @classmethod
    def take(cls, pids: Iterable[int] = ()) -> RawSnapshot:
        """Read all processes; of ``pids``, also context switches of threads."""
        begin_s, before = time.monotonic(), _read("/proc/stat", _STAT_BYTES)
        processes = {
            int(name): stat
            for name in os.listdir("/proc")
            if name.isdigit() and (stat := _read(f"/proc/{name}/stat"))
        }
        statuses = {pid: _thread_statuses(pid) for pid in pids}
        end_s, after = time.monotonic(), _read("/proc/stat", _STAT_BYTES)
        return cls((begin_s, end_s), (before, after), processes, statuses)

    def parse(self) -> Snapshot:
        # On a busy machine, looking at the processes takes a while. The CPUs' times are
        # taken for the middle of it.
        before, after = map(_cpu_times, self.cpus)
        switches = next(
            line for line in self.cpus[1].splitlines() if line.startswith(b"ctxt ")
        )
        return Snapshot(
            time_s=sum(self.times_s) / 2,
            cpu_count=os.sysconf("SC_NPROCESSORS_ONLN"),
            cpus={name: (before[name] + after[name]) / 2 for name in before},
            context_switches=int(switches.split()[1]),
            processes={pid: _process(stat) for pid, stat in self.processes.items()},
            switches_of={
                pid: sum(map(_context_switches, statuses))
                for pid, statuses in self.statuses.items()
            },
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


def _thread_statuses(pid: int) -> list[bytes]:
    with suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
        return [_read(f"/proc/{pid}/task/{thread}/status") for thread in threads]
    return []


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


def _context_switches(status: bytes) -> int:
    """Return a thread's switches, voluntary or not, from its status."""
    return sum(
        int(line.partition(b":")[2])
        for line in status.splitlines()
        if b"voluntary_ctxt_switches" in line
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
        """Return the cores of all processes, with those ended and reaped since."""
        sums_s = [
            sum(one.own_s + one.children_s for one in snapshot.processes.values())
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

    def context_switches(self) -> float:
        """Return context switches per second of all CPUs."""
        count = self.after.context_switches - self.before.context_switches
        return count / self.window_s

    def context_switches_of(self, pid: int) -> float:
        """Return those of a process that both snapshots were asked for, per second. NB:
        switches of threads that have ended in between are missing.
        """
        count = self.after.switches_of[pid] - self.before.switches_of[pid]
        return count / self.window_s


def cpu_mhz() -> float | None:
    """Return the CPUs' mean clock rate now; None if the kernel does not tell."""
    rates = [
        float(line.partition(":")[2])
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("cpu MHz")
    ]
    return sum(rates) / len(rates) if rates else None


def pressure_us() -> dict[str, int]:
    """Return the microseconds since boot in which some task waited for "cpu", "io" or
    "memory" (PSI); empty if the kernel does not count them.
    """
    found = {}
    for resource in ("cpu", "io", "memory"):
        with suppress(OSError):
            some = Path(f"/proc/pressure/{resource}").read_text().splitlines()[0]
            found[resource] = int(some.rpartition("total=")[2])
    return found
