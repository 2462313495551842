"""The default content of devices and volumes: a fixture that tests can override."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from btrfs_ublk.server import Segment

_SIZE_BYTES = 1 << 40


@pytest.fixture(scope="session")
def btrfs_ublk_contents() -> Sequence[Segment]:
    """What the devices and volumes of the fixtures without "_factory" hold: segments,
    from offset 0 on. Here, 1 TiB of a pattern: each 8 bytes are their own offset, in
    little-endian. Override it in your conftest.py.
    """
    from btrfs_ublk.server import PatternSegment

    return [PatternSegment(offset=0, length=_SIZE_BYTES)]
