"""Fitting a published workload to this machine.

A suite names its amounts (bytes, seconds, counts) as published. A factor from 0 to 1
reduces all of them, each down to a sensible minimum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import MIB, format_size

#: The amounts of a suite, by name.
Amounts = Mapping[str, float]

#: "auto" takes the first factor that fits.
_FACTORS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
#: The limit of all turns together, and of the shares of free memory and space.
_MOST_S = 1200.0
_MEMORY_SHARE = 0.5

#: These amounts are known to all comparisons: bytes to read of each, seconds of a turn.
SIZE, RUNTIME = "size_bytes", "runtime_s"


@dataclass(frozen=True)
class Quantity:
    """``full`` is the published value, ``least`` the sensible minimum."""

    name: str
    full: float
    least: float
    unit: Literal["bytes", "s", ""] = ""

    def scaled(self, factor: float) -> float:
        """Scale, and round to whole MiB, tenths of a second, or whole numbers."""
        value = max(self.least, self.full * factor)
        if self.unit == "s":
            return round(value, 1)
        if self.unit == "bytes":
            return max(self.least, value // MIB * MIB)
        return int(value)

    def text(self, value: float) -> str:
        if self.unit == "bytes":
            return format_size(int(value))
        return f"{value:g} s" if self.unit == "s" else f"{value:,g}"


@dataclass(frozen=True)
class Cost:
    """The cost of a suite: memory (and files on tmpfs), and one turn of all."""

    memory_bytes: float
    turn_s: float


@dataclass(frozen=True)
class Scaling:
    quantities: Sequence[Quantity]
    cost: Callable[[Amounts], Cost]

    def amounts(self, factor: float) -> dict[str, float]:
        return {each.name: each.scaled(factor) for each in self.quantities}

    def factor_for(self, parent: Path, *, turns: int) -> float:
        """Return the largest factor that fits half of the free memory and space, and 20
        minutes. Raises BtrfsUblkError when nothing fits the memory.
        """
        free_bytes = _free_bytes(parent)
        for factor in _FACTORS:
            cost = self.cost(self.amounts(factor))
            if cost.memory_bytes > free_bytes * _MEMORY_SHARE:
                continue
            if factor == _FACTORS[-1] or cost.turn_s * turns <= _MOST_S:
                return factor
        least = self.cost(self.amounts(_FACTORS[-1])).memory_bytes
        raise BtrfsUblkError(
            f"{format_size(int(free_bytes))} are free in memory and in {parent}: "
            f"half of that is too little, {format_size(int(least))} are needed",
            hint="end what uses memory, or name another --parent",
        )

    def told(self, factor: float) -> str:
        """Describe a factor: "scaled by 0.01: size_bytes 8 GiB -> 81 MiB, …"."""
        amounts = self.amounts(factor)
        parts = [
            f"{each.name} {each.text(each.full)} -> {each.text(amounts[each.name])}"
            for each in self.quantities
            if amounts[each.name] != each.full
        ]
        return f"scaled by {factor:g}: {', '.join(parts)}" if parts else "full size"

    def record(self, factor: float) -> dict[str, Any]:
        """Return the scale for a document."""
        return {
            "factor": factor,
            "full": {each.name: each.full for each in self.quantities},
            "used": self.amounts(factor),
            "units": {each.name: each.unit for each in self.quantities},
        }


def _free_bytes(parent: Path) -> float:
    space = os.statvfs(parent)
    free_bytes = space.f_bavail * space.f_frsize
    return float(min(free_bytes, psutil.virtual_memory().available))


def parse_factor(text: str) -> float | None:
    """Parse a factor; "auto" is None. Raises UsageError for an invalid one."""
    if text == "auto":
        return None
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor <= 1:
        raise UsageError(
            f"--scale {text!r} is neither auto nor a number above 0, up to 1",
            hint="0.01 is a hundredth of what was published",
        )
    return factor
