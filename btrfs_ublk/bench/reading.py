"""Read peers by fio, in turns.

``again:NAME`` is a second instance of a peer, to see how much equals differ.
``batch:NAME`` is one whose server runs in SCHED_BATCH, as our ublk server
does: a policy that anybody can give it (``chrt -b``).
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from btrfs_ublk.base.capabilities import Fio, require
from btrfs_ublk.base.readers import read_buffered, read_direct
from btrfs_ublk.bench.content import check_blocks
from btrfs_ublk.bench.cpu import Usage
from btrfs_ublk.bench.fio import Workload, parse_workload, run_fio
from btrfs_ublk.bench.peer import Peer, Setting, Subject, all_peers
from btrfs_ublk.bench.report import Result
from btrfs_ublk.errors import UsageError

#: The share of the runtime in which fio reads before it is measured, and the least
#: seconds for that.
_RAMP_SHARE, _LEAST_RAMP_S = 0.1, 0.2
_SAMPLES = 16
AGAIN, BATCH = "again:", "batch:"


def measure(
    subject: Subject,
    workload: Workload,
    *,
    size_bytes: int,
    runtime_s: float,
    output: Path,
    chances: random.Random,
) -> Result:
    """Measure a turn; all CPU times are microseconds per I/O.

    Random blocks are checked before and after. Raises BtrfsUblkError for wrong data,
    and when fio fails.
    """
    direct = subject.direct and not workload.is_mapped

    def check() -> None:
        check_blocks(
            subject.path,
            subject.content,
            size_bytes,
            read=read_direct if direct else read_buffered,
            samples=_SAMPLES,
            chances=chances,
        )

    check()
    load = os.getloadavg()[0]
    outcome, usage = run_fio(
        workload,
        subject.path,
        size_bytes=size_bytes,
        direct=direct,
        ramp_s=max(_LEAST_RAMP_S, _RAMP_SHARE * runtime_s),
        runtime_s=runtime_s,
        output=output,
        server_pids=subject.server_pids,
    )
    check()
    iops = outcome.total_iops
    return {
        "iops": iops,
        "bytes_per_s": iops * workload.block_bytes,
        "p50_us": outcome.latency_us["p50"],
        "p99_us": outcome.latency_us["p99"],
        "load": load,
        **(cpu_record(usage, iops) if usage else {}),
    }


def cpu_record(usage: Usage, iops: float) -> Result:
    """Return CPU time per I/O of the reader, the servers, and the kernel on its own
    (its threads, interrupts); and cores used by these together, by others, and by all
    (the CPUs' own counters). "accounted" is the use by all processes and kernel threads
    as a share of the latter: if it is not near 1, a counter is wrong.
    """
    cores = usage.record()
    parts = {"fio": cores["fio"], "server": cores["server"]}
    parts["kernel"] = max(0.0, cores["rest"] - cores["other"])
    return {
        **{f"{name}_us": used * 1e6 / iops for name, used in parts.items()},
        "cpu_us": sum(parts.values()) * 1e6 / iops,
        "cores": sum(parts.values()),
        "other_cores": cores["other"],
        "total_cores": cores["total"],
        "accounted": cores["accounted"],
    }


#: Runs one turn of the named workload, and returns its result. The random numbers are
#: the same for all peers in one turn. Raises CapabilityError for what cannot be done
#: here, BtrfsUblkError and OSError for failures.
Turn = Callable[[str, random.Random], Result]


@contextmanager
def taking_part(peer: Peer, setting: Setting) -> Iterator[Turn]:
    """Bring a peer up, and take it down after the block."""
    with peer.serving(setting) as subject:
        is_batch = peer.name.startswith(BATCH)
        for task in _tasks(subject.server_pids) if is_batch else ():
            os.sched_setscheduler(task, os.SCHED_BATCH, os.sched_param(0))

        def turn(workload: str, chances: random.Random) -> Result:
            return measure(
                subject,
                parse_workload(workload),
                size_bytes=setting.size_bytes,
                runtime_s=setting.runtime_s,
                output=setting.directory / "fio.json",
                chances=chances,
            )

        yield turn


def _tasks(pids: Iterable[int]) -> Iterator[int]:
    for pid in pids:
        yield from map(int, os.listdir(f"/proc/{pid}/task"))


def find_peers(names: Sequence[str]) -> Sequence[Peer]:
    """Return peers in the order of names. Raises UsageError for an unknown or repeated
    name.
    """
    known = all_peers()
    for name in names:
        prefix, colon, inner = name.partition(":")
        if prefix + colon in (AGAIN, BATCH) and inner in known:
            known[name] = replace(known[inner], name=name)
        if name not in known:
            raise UsageError(
                f"there is no peer {name!r}", hint=f"known: {', '.join(known)}"
            )
        if names.count(name) > 1:
            raise UsageError(
                f"peer {name} is named twice",
                hint=f"for the same once more: {AGAIN}{name}",
            )
    return [known[name] for name in names]


def check_workload(name: str) -> None:
    """Raise UsageError for an unknown workload, CapabilityError for one that this
    machine cannot do with any peer.
    """
    require(Fio(parse_workload(name).engine))
