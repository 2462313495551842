"""Nothing that looks at a volume's device from outside (udev, blkid, ...) fails."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import Need
from support.processes import looking_at_all_devices
from support.volumes import NAME, Place

from btrfs_ublk.base.capabilities import FUSE, UBLK
from btrfs_ublk.device import show_device
from btrfs_ublk.kernel.btrfs import forget_device
from btrfs_ublk.server import FrontEndName, ServerStats
from btrfs_ublk.units import MIB
from btrfs_ublk.volume import kept_volume, show_volume

#: All that this machine has of what is run on block devices nobody told it about.
PROBES = [
    ["blkid", "{}"],
    ["blkid", "--probe", "{}"],
    ["udevadm", "test-builtin", "blkid", "/sys/class/block/{name}"],
    ["lsblk", "--fs"],
    ["wipefs", "{}"],
    ["btrfs", "device", "scan"],
    ["btrfs", "filesystem", "show", "{}"],
    ["partx", "--show", "{}"],
    ["blockdev", "--rereadpt", "{}"],
    ["sfdisk", "--dump", "{}"],
    ["parted", "--script", "{}", "print"],
    ["mdadm", "--examine", "{}"],
    ["file", "--special-files", "{}"],
    ["udevadm", "info", "{}"],
    ["gdisk", "-l", "{}"],
    ["fdisk", "--list", "{}"],
    ["partprobe", "{}"],
    ["btrfs", "inspect-internal", "dump-super", "--all", "{}"],
]

#: What is run on all that is mounted, by people and at night.
VISITORS = [
    ["df", "{}"],
    ["df", "--inodes", "{}"],
    ["du", "--summarize", "{}"],
    ["updatedb", "--database-root", "{}", "--prunepaths", "", "--output", "{out}"],
    ["tar", "--create", "--file", "{out}", "{}"],
    ["find", "{}", "-xdev", "-size", "+1G"],
    ["btrfs", "filesystem", "usage", "{}"],
    ["fstrim", "{}"],
    ["fuser", "--mount", "{}"],
]


@pytest.fixture
def place(need: Need, front_end: FrontEndName, sparse_path: Path) -> Iterator[Place]:
    need(UBLK if front_end == "ublk" else FUSE)
    found = Place(sparse_path, front_end)
    yield found
    found.take_all_down()


def errors() -> int:
    stats = show_device(NAME).stats
    assert stats is not None
    return sum(kind.errors for kind in ServerStats.parse(stats).kinds.values())


def test_probes_fail_no_read(place: Place) -> None:
    with kept_volume(NAME, place.definition("one"), base=place.base) as volume:
        device = volume.device
        assert device is not None
        seen = []
        for probe in PROBES:
            if shutil.which(probe[0]) is None:
                continue
            drop_pages(device)
            argv = [word.format(device, name=device.name) for word in probe]
            with looking_at_all_devices():
                done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
            seen.append(probe[0])
            assert errors() == 0, (argv, done)
            if probe[:2] == ["blkid", "--probe"]:
                # Nothing that it found behind the seed has made it doubt.
                assert 'TYPE="btrfs"' in done.stdout
        forget_device(device)
        assert {"blkid", "lsblk", "wipefs", "btrfs"} <= set(seen)
        for visitor in VISITORS:
            if shutil.which(visitor[0]) is None:
                continue
            out = place.root / "out"
            argv = [word.format(place.target, out=out) for word in visitor]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
            assert errors() == 0, (argv, done)
        # Read-ahead does not reach what nobody has mapped either.
        drop_pages(device)
        with device.open("rb") as file:
            end = file.seek(-16 * MIB, os.SEEK_END)
            while data := file.read(MIB):
                assert not any(data)
            assert file.tell() == end + 16 * MIB
        assert errors() == 0
        found = show_volume(NAME, base=place.base)
        assert found.state == "up" and found.failing is None


def drop_pages(device: Path) -> None:
    """So that the next one to look has to ask the server."""
    with device.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
