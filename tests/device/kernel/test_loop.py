"""Loop devices: geometry, identity, detaching, races."""

import os
import subprocess
from pathlib import Path

import pytest
from support.devices import attach_again, backing_of, detach
from support.processes import unwatched

from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import LeftoverError, UsageError
from btrfs_ublk.kernel import blockdev, loop, loop_device, mounted

MIB = 1 << 20


@pytest.fixture
def image(sparse_path: Path) -> Path:
    path = sparse_path / "image"
    path.write_bytes(os.urandom(MIB))
    return path


def test_the_device_shows_the_file_and_goes_away(image: Path) -> None:
    with loop_device(image, read_only=True) as device:
        assert backing_of(device.path) == str(image)
        assert device.path.read_bytes() == image.read_bytes()
        assert blockdev.size_bytes(device.path) == device.size_bytes == MIB
        assert blockdev.logical_block_bytes(device.path) == 4096
        assert blockdev.is_read_only(device.path)
        fd = os.open(device.path, os.O_RDWR)
        with pytest.raises(PermissionError):
            os.pwrite(fd, bytes(4096), 0)
        os.close(fd)
    assert backing_of(device.path) is None


def test_a_part_of_the_file(image: Path) -> None:
    part = loop_device(image, offset_bytes=8192, size_bytes=16384, read_only=True)
    with part as device:
        assert device.path.read_bytes() == image.read_bytes()[8192:24576]


def test_what_the_kernel_would_cut_off_is_refused(image: Path) -> None:
    for arguments, message in (
        ({"offset_bytes": 100}, "offset 100 bytes is not a multiple of 4096"),
        ({"size_bytes": 5000}, "length 5000 bytes is not a multiple"),
        ({"size_bytes": 2 * MIB}, "is not a part of its 1048576 bytes"),
        ({"offset_bytes": -4096}, "is not a part of its"),
    ):
        with pytest.raises(UsageError, match=message):
            with loop_device(image, **arguments):
                pass


def test_someone_elses_device_on_our_file_is_left_alone(image: Path) -> None:
    """Even when it has taken the very device number that was ours."""
    with loop_device(image, read_only=True) as device:
        detach(device.path)
        attach_again(device.path, image, "-r")
    try:
        assert backing_of(device.path) == str(image)
    finally:
        detach(device.path)


def test_a_device_whose_number_was_never_noted_is_found(image: Path) -> None:
    with loop_device(image, read_only=True) as device:
        (entry,) = process_ledger().entries()
        del entry.details["path"]
    assert backing_of(device.path) is None


def test_someone_who_has_it_open_delays_the_detaching(image: Path) -> None:
    with unwatched(), loop_device(image, read_only=True) as device:
        with subprocess.Popen(
            ["sh", "-c", f"exec 3<{device.path}; echo; exec sleep 0.5"],
            stdout=subprocess.PIPE,
        ) as reader:
            assert reader.stdout is not None
            reader.stdout.readline()
            process_ledger().undo(process_ledger().entries()[0])
            assert backing_of(device.path) is None
            assert reader.wait(60) == 0


def test_a_mounted_device_is_not_opened_to_find_out(
    sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor while an unmount is under way: a mount that comes just then would fail."""
    image, target = sparse_path / "image", sparse_path / "mnt"
    target.mkdir()
    with image.open("wb") as file:
        file.truncate(128 * MIB)
    run(["mkfs.btrfs", "-q", image], timeout_s=60)
    with loop_device(image) as device:
        with mounted(device.path, target), monkeypatch.context() as patch:
            patch.setattr(blockdev, "is_claimed", lambda path: pytest.fail("opened"))
            (user,) = blockdev.wait_until_unused(device.path, timeout_s=1)
            assert user == f"mounted at {target} (btrfs)"
            patch.setattr(blockdev, "read_mountinfo", lambda **_: [])
            (user,) = blockdev.wait_until_unused(device.path, timeout_s=0.1)
            assert "another mount namespace" in user


def test_a_device_that_stays_open_is_reported(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_DETACH_TIMEOUT_S", 0.3)
    with pytest.raises(LeftoverError, match="still attached"):
        with loop_device(image, read_only=True) as device:
            fd = os.open(device.path, os.O_RDONLY)
    os.close(fd)
    process_ledger().undo(process_ledger().entries()[0])


def test_a_mounted_device_is_not_detached(
    sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, target = sparse_path / "image", sparse_path / "mnt"
    target.mkdir()
    with image.open("wb") as file:
        file.truncate(128 * MIB)
    run(["mkfs.btrfs", "-q", image], timeout_s=60)
    with loop_device(image) as device, mounted(device.path, target):
        entry = process_ledger().entries()[0]
        with pytest.raises(
            LeftoverError, match=f"still uses it: mount target={target}"
        ):
            process_ledger().undo(entry)
        # Nor when the mount is in nobody's ledger.
        monkeypatch.setattr(process_ledger(), "_entries", {entry.sequence: entry})
        with pytest.raises(LeftoverError, match=f"mounted at {target}"):
            process_ledger().undo(entry)
        monkeypatch.undo()
        assert backing_of(device.path) == str(image)
        assert blockdev.is_claimed(device.path)
