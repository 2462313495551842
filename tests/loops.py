"""Loop devices that tests attach and detach by losetup(8)."""

from __future__ import annotations

from pathlib import Path

from btrfs_ublk.base.process import run
from btrfs_ublk.kernel.uevents import wait_until


def backing_of(path: Path) -> str | None:
    file = Path("/sys/block") / path.name / "loop/backing_file"
    return file.read_text().strip() if file.exists() else None


def detach(path: Path) -> None:
    """Detach it and wait for that. losetup(8) does not while udev, say, has it open."""
    run(["losetup", "-d", path], timeout_s=30)
    wait_until(lambda: backing_of(path) is None, timeout_s=30, what="still attached")
