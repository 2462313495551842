"""The contest of reading by fio: all peers can take part.

``again:NAME`` is a second instance of a peer, to see how much equals differ.
``batch:NAME`` is one whose server runs in SCHED_BATCH, as our ublk server
does: a policy that anybody can give it (``chrt -b``).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from btrfs_ublk.base.capabilities import Fio, require
from btrfs_ublk.base.readers import read_buffered, read_direct
from btrfs_ublk.bench.content import check_blocks
from btrfs_ublk.bench.cpu import Usage
from btrfs_ublk.bench.fio import Workload, parse_workload, run_fio
from btrfs_ublk.bench.peer import (
    Contest,
    Contestant,
    Measure,
    Peer,
    Setting,
    Subject,
    Turn,
    all_peers,
)
from btrfs_ublk.bench.report import Result

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


@contextmanager
def _taking_part(peer: Peer, prefix: str, setting: Setting) -> Iterator[Turn]:
    with peer.serving(setting) as subject:
        for task in _tasks(subject.server_pids) if prefix == BATCH else ():
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


def _reader(peer: Peer, prefix: str = "") -> Contestant:
    taking_part = partial(_taking_part, peer, prefix)
    name = f"{prefix}{peer.name}"
    return Contestant(name, peer.layer, peer.description, peer.needs, taking_part)


@dataclass(frozen=True)
class FioContest(Contest):
    """A contest of all peers."""

    measures: Sequence[Measure] = (Measure("iops", "IOPS", "more"),)

    def known(self, names: Sequence[str]) -> Mapping[str, Contestant]:
        peers = all_peers()
        known = {name: _reader(peer) for name, peer in peers.items()}
        for name in names:
            prefix, colon, inner = name.partition(":")
            if prefix + colon in (AGAIN, BATCH) and inner in peers:
                known[name] = _reader(peers[inner], prefix + colon)
        return known

    def check(self, workload: str) -> None:
        require(Fio(parse_workload(workload).engine))


READING = FioContest()
