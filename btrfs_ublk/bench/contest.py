"""What a comparison does with each of its peers, and what comes of it.

A contest has contestants, which take part in turns of workloads, by name; each turn
yields the contest's measures. The contest of reading and writing by fio
(``bench.reading``) has all peers as contestants; others have some of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from btrfs_ublk.bench.peer import Setting
from btrfs_ublk.bench.report import Result
from btrfs_ublk.capabilities import Capability, require
from btrfs_ublk.errors import UsageError


@dataclass(frozen=True)
class Measure:
    """One figure of a turn: its key in results, its unit, and what is better."""

    name: str
    unit: str
    better: Literal["more", "less"] = "less"
    digits: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


#: One turn of the workload of that name: what was measured. The random numbers are the
#: same for all in one turn. Raises CapabilityError for what cannot be done here,
#: BtrfsUblkError and OSError for what went wrong.
Turn = Callable[[str, random.Random], Result]


class Contestant(Protocol):
    """Something that takes part."""

    @property
    def name(self) -> str:
        """As on command lines."""

    @property
    def layer(self) -> str:
        """What is measured: a "device", a "file", a "tree" of files, ..."""

    @property
    def description(self) -> str:
        """One line."""

    @property
    def needs(self) -> Sequence[Capability]: ...

    def taking_part(self, setting: Setting) -> AbstractContextManager[Turn]:
        """Bring it up; take it down when the block is left."""


class Contest(Protocol):
    """``measures``: the first is what contestants are judged by."""

    @property
    def measures(self) -> Sequence[Measure]: ...

    def find(self, names: Sequence[str]) -> Sequence[Contestant]:
        """In that order. Raises UsageError for a name that is unknown, or comes
        twice.
        """

    def check(self, workload: str) -> None:
        """Raise UsageError for a name that means nothing, CapabilityError for what this
        machine cannot do with anybody.
        """


@dataclass(frozen=True)
class OwnContest:
    """A contest of contestants that no other has; ``workloads`` tells what each is."""

    measures: Sequence[Measure]
    contestants: Sequence[Contestant]
    workloads: Mapping[str, str]
    needs: Sequence[Capability] = ()

    def find(self, names: Sequence[str]) -> Sequence[Contestant]:
        known = {each.name: each for each in self.contestants}
        check_names(names, known)
        return [known[name] for name in names]

    def check(self, workload: str) -> None:
        if workload not in self.workloads:
            raise UsageError(
                f"there is no workload {workload!r}",
                hint=f"known: {', '.join(self.workloads)}",
            )
        require(*self.needs)


def check_names(names: Sequence[str], known: Mapping[str, object]) -> None:
    """Raise UsageError for a name that is unknown, or comes twice."""
    for name in names:
        if name not in known:
            raise UsageError(
                f"there is no peer {name!r}", hint=f"known: {', '.join(known)}"
            )
        if names.count(name) > 1:
            raise UsageError(
                f"peer {name} is named twice",
                hint=f"for the same once more: again:{name}",
            )
