"""The contest of reading, or writing, by fio: all peers can take part.

``again:NAME`` is one more of a peer, to see how much two of the same differ;
``slowed:NAME`` is one more that loses 10 % of the CPUs' time on purpose, to see whether
that is seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from btrfs_ublk.bench.contest import Contestant, Measure, Turn, check_names
from btrfs_ublk.bench.fio import Fio
from btrfs_ublk.bench.measure import measure
from btrfs_ublk.bench.peer import Peer, Setting, all_peers
from btrfs_ublk.bench.report import Result
from btrfs_ublk.bench.stolen import stolen_time
from btrfs_ublk.bench.workloads import parse_workload
from btrfs_ublk.capabilities import Capability, require
from btrfs_ublk.errors import CapabilityError, UsageError

AGAIN, SLOWED = "again:", "slowed:"
#: What a slowed peer, with all else, loses of its time.
_STOLEN_SHARE = 0.1

MEASURES = (Measure("iops", "IOPS", "more"),)


@dataclass(frozen=True)
class Reader:
    """A peer that fio reads from; with ``writing``, it writes to it as well."""

    peer: Peer
    writing: bool = False
    prefix: str = ""

    @property
    def name(self) -> str:
        return f"{self.prefix}{self.peer.name}"

    @property
    def layer(self) -> str:
        return self.peer.layer

    @property
    def description(self) -> str:
        return self.peer.description

    @property
    def needs(self) -> Sequence[Capability]:
        return self.peer.needs

    @contextmanager
    def taking_part(self, setting: Setting) -> Iterator[Turn]:
        setting = replace(setting, writable=self.writing)
        with self.peer.serving(setting) as subject:
            if self.writing and not subject.writable:
                raise CapabilityError("it can only be read")

            def turn(workload: str, chances: random.Random) -> Result:
                slowed = self.prefix == SLOWED
                with stolen_time(_STOLEN_SHARE) if slowed else nullcontext():
                    return measure(
                        subject,
                        parse_workload(workload),
                        size_bytes=setting.size_bytes,
                        runtime_s=setting.runtime_s,
                        output=setting.directory / "fio.json",
                        chances=chances,
                    )

            yield turn


@dataclass(frozen=True)
class FioContest:
    """Of all peers. In one with ``writing`` those that can be written take part, and
    what they hold then may be either what they had, or what fio writes.
    """

    writing: bool = False
    measures: Sequence[Measure] = MEASURES

    def find(self, names: Sequence[str]) -> Sequence[Contestant]:
        known = self._known(names)
        check_names(names, known)
        return [known[name] for name in names]

    def _known(self, names: Sequence[str]) -> Mapping[str, Contestant]:
        peers = all_peers()
        known = {name: Reader(peer, self.writing) for name, peer in peers.items()}
        for name in names:
            prefix, colon, inner = name.partition(":")
            if prefix + colon in (AGAIN, SLOWED) and inner in peers:
                known[name] = Reader(peers[inner], self.writing, prefix + colon)
        return known

    def check(self, workload: str) -> None:
        parsed = parse_workload(workload)
        if parsed.writes != self.writing:
            does, wanted = ("writes", "read") if parsed.writes else ("reads", "written")
            raise UsageError(
                f"workload {workload!r} {does}, and these peers are to be {wanted}",
                hint="suites that write: syncwrite, virtiofs",
            )
        require(Fio(parsed.engine))


READING = FioContest()
WRITING = FioContest(writing=True)
