"""How much of the long tests is done: BTRFS_UBLK_SOAK_PERCENT, 10 unless it is set."""

from __future__ import annotations

import os

import pytest

SOAK_PERCENT = int(os.environ.get("BTRFS_UBLK_SOAK_PERCENT", "10"))


def share_of(whole: int, *, least_percent: int = 0) -> int:
    """Return how much is done of what is ``whole`` with 100 %."""
    return whole * max(SOAK_PERCENT, least_percent) // 100


def rounds(count: int) -> list[object]:
    """Return the parameters 0 to ``count`` - 1: the gate does two of these rounds."""
    return [
        *range(2),
        *(pytest.param(x, marks=pytest.mark.thorough) for x in range(2, count)),
    ]
