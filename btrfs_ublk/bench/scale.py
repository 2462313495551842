"""How much of a published workload fits this machine.

A suite names its amounts (bytes, seconds, counts) as published. A factor from 0 to 1
makes all of them smaller, each down to what still makes sense.
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

#: What a suite has as much of as it says: by name.
Amounts = Mapping[str, float]

#: "auto" takes the first that fits.
_FACTORS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
#: All turns together, and the share of the memory, and of the space, that is free.
_MOST_S = 1200.0
_MEMORY_SHARE = 0.5

#: Less says nothing, of fio.
_LEAST_BYTES, _LEAST_S = 16 * MIB, 0.5

#: These two are what all comparisons know: what is read of each, how long a turn takes.
SIZE, RUNTIME = "size_bytes", "runtime_s"


@dataclass(frozen=True)
class Quantity:
    """``full`` as published, ``least`` as little as still makes sense."""

    name: str
    full: float
    least: float
    unit: Literal["bytes", "s", ""] = ""

    def scaled(self, factor: float) -> float:
        """Whole MiB, tenths of a second, whole numbers."""
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
    """Of a suite: memory (files on tmpfs in it), and the time of one turn of all."""

    memory_bytes: float
    turn_s: float


@dataclass(frozen=True)
class Scaling:
    quantities: Sequence[Quantity]
    cost: Callable[[Amounts], Cost]

    def amounts(self, factor: float) -> dict[str, float]:
        return {each.name: each.scaled(factor) for each in self.quantities}

    def factor_for(self, parent: Path, *, turns: int) -> float:
        """The largest that fits: half of the memory and space that are free, and 20
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
        """ "scaled by 0.01: size_bytes 8 GiB -> 81 MiB, …" """
        amounts = self.amounts(factor)
        parts = [
            f"{each.name} {each.text(each.full)} -> {each.text(amounts[each.name])}"
            for each in self.quantities
            if amounts[each.name] != each.full
        ]
        return f"scaled by {factor:g}: {', '.join(parts)}" if parts else "full size"

    def record(self, factor: float) -> dict[str, Any]:
        """For a document."""
        return {
            "factor": factor,
            "full": {each.name: each.full for each in self.quantities},
            "used": self.amounts(factor),
            "units": {each.name: each.unit for each in self.quantities},
        }


#: Of a turn of fio: the share that it reads before it counts; checks, and its start.
_RAMP_SHARE, _BESIDES_S = 0.1, 1.0


def fio_scaling(
    *, full_bytes: int, full_s: float, copies: int, measurements: int
) -> Scaling:
    """Of a suite whose peers are read (written) by fio: of so many bytes, for so many
    seconds; ``copies`` of the data are in memory, and a turn has so many measurements.
    """

    def cost(amounts: Amounts) -> Cost:
        each_s = (1 + _RAMP_SHARE) * amounts[RUNTIME] + _BESIDES_S
        return Cost(copies * amounts[SIZE], measurements * each_s)

    size = Quantity(SIZE, full_bytes, _LEAST_BYTES, "bytes")
    return Scaling([size, Quantity(RUNTIME, full_s, _LEAST_S, "s")], cost)


def _free_bytes(parent: Path) -> float:
    space = os.statvfs(parent)
    free_bytes = space.f_bavail * space.f_frsize
    return float(min(free_bytes, psutil.virtual_memory().available))


def parse_factor(text: str) -> float | None:
    """ "auto" is None. Raises UsageError for what is no share of all."""
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
