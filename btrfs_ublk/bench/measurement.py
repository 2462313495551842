"""What a comparison does with each peer, and what comes of it.

A contest has contestants, which perform workloads, given by name, in turns. Each turn
yields the contest's measures. The contest of reading and writing by fio
(``bench.reading``) has all peers as contestants; others have their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from btrfs_ublk.base.capabilities import Capability, require
from btrfs_ublk.bench.peer import Setting
from btrfs_ublk.bench.report import Result
from btrfs_ublk.errors import UsageError


@dataclass(frozen=True)
class Measure:
    """One figure of a turn: key in results, unit, and whether more is better."""

    name: str
    unit: str
    better: Literal["more", "less"] = "less"
    digits: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


#: Runs one turn of the named workload, and returns its result. The random numbers are
#: the same for all contestants in one turn. Raises CapabilityError for what cannot be
#: done here, BtrfsUblkError and OSError for failures.
Turn = Callable[[str, random.Random], Result]


@dataclass(frozen=True)
class Contestant:
    """Something that takes part. ``name`` is its name on command lines, ``description``
    one line, ``layer`` what is measured: a "device", a "file", a "tree" of files, ...
    ``taking_part`` brings it up, and takes it down at the end of the block.
    """

    name: str
    layer: str
    description: str
    needs: Sequence[Capability]
    taking_part: Callable[[Setting], AbstractContextManager[Turn]]


class Contest(Protocol):
    """``measures``: contestants are judged by the first."""

    @property
    def measures(self) -> Sequence[Measure]: ...

    def find(self, names: Sequence[str]) -> Sequence[Contestant]:
        """Return contestants in the order of names. Raises UsageError for an unknown or
        repeated name.
        """

    def check(self, workload: str) -> None:
        """Raise UsageError for an unknown workload, CapabilityError for one that this
        machine cannot do with any contestant.
        """


@dataclass(frozen=True)
class OwnContest:
    """A contest with its own contestants; ``workloads`` describes each workload."""

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
    """Raise UsageError for an unknown or repeated name."""
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
