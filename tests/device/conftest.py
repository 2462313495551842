"""Tests in this folder make devices: they need root, btrfs, loop devices and FUSE.

Those with the parameter `ublk` need that driver, and run in a VM where the kernel has
none. `scripts/test` runs several at a time, each worker with mounts of its own.
"""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("device")
