"""Waiting for kernel events, with and without them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from btrfs_ublk.kernel import blockdev, loop_device
from btrfs_ublk.kernel.uevents import uevent_monitor


def test_a_loop_device_makes_an_event(sparse_path: Path) -> None:
    image = sparse_path / "image"
    image.write_bytes(bytes(4096))
    with uevent_monitor() as monitor:
        with loop_device(image):
            assert monitor.wait(timeout_s=5)


def test_a_node_is_waited_for(sparse_path: Path) -> None:
    node = sparse_path / "node"
    threading.Timer(0.1, node.touch).start()
    blockdev.wait_for_node(node, timeout_s=10)
    node.unlink()
    with pytest.raises(TimeoutError, match="did not appear"):
        blockdev.wait_for_node(node, timeout_s=0.1)
