"""How much of the long tests is done: BTRFS_UBLK_SOAK_PERCENT, 10 unless it is set."""

from __future__ import annotations

import os

SOAK_PERCENT = int(os.environ.get("BTRFS_UBLK_SOAK_PERCENT", "10"))


def share_of(whole: int, *, least_percent: int = 0) -> int:
    """Return how much is done of what is ``whole`` with 100 %."""
    return whole * max(SOAK_PERCENT, least_percent) // 100
