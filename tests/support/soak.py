"""How much of the long tests is done: BTRFS_UBLK_SOAK_PERCENT, 10 unless it is set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count

import pytest

SOAK_PERCENT = int(os.environ.get("BTRFS_UBLK_SOAK_PERCENT", "10"))


def share_of(whole: int, *, least_percent: int = 0) -> int:
    """Return how much is done of what is ``whole`` with 100 %."""
    return whole * max(SOAK_PERCENT, least_percent) // 100


def rounds(whole: int) -> list[object]:
    """Return the parameters 0 to ``whole`` - 1: the gate does two of these rounds."""
    later = (pytest.param(x, marks=pytest.mark.thorough) for x in range(2, whole))
    return [*range(2), *later]


def moments() -> Iterator[int]:
    """Return numbers of events at which something is killed, for ever: all of them with
    100 %, else one in seven, as each takes a fork of this process."""
    return count(1, 1 if SOAK_PERCENT >= 100 else 7)
