"""Figures that others have published, from their own hardware: one module of
``published`` each. Only ratios within such a table may be held against ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """``peer`` is what they called it, ``like`` the peer of ours that is the same, or
    stands in for it. ``measure`` is the key in our results, in its unit.
    """

    workload: str
    peer: str
    like: str | None
    measure: str
    value: float
    #: What its ratio is to: the first of the same workload, measure and setting.
    setting: str = ""


@dataclass(frozen=True)
class Published:
    """``source`` says whose, and of when; ``hardware`` what they were measured on;
    ``note`` what differs from ours, but for that.
    """

    source: str
    hardware: str
    note: str
    figures: Sequence[Figure]

    def to_dict(self) -> dict[str, Any]:
        """For a document."""
        return asdict(self) | {"other_hardware": True}
