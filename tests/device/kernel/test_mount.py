"""Mounts: their identity, and unmounting when somebody is in the way."""

import os
import subprocess
from pathlib import Path

import pytest

from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import LeftoverError
from btrfs_ublk.kernel import loop_device
from btrfs_ublk.kernel import mount as module
from btrfs_ublk.kernel import mounted, tempdir
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.kernel.waiting import wait_until


@pytest.fixture
def target(sparse_path: Path) -> Path:
    # A name with everything that /proc/self/mountinfo escapes.
    path = sparse_path / "a b\t\\c"
    path.mkdir()
    return path


def targets() -> list[Path]:
    return [mount.target for mount in read_mountinfo()]


class TestMounted:

    def test_who_keeps_it_busy_is_named(
        self, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_BUSY_TIMEOUT_S", 0.2)
        with pytest.raises(LeftoverError) as caught:
            with mounted("none", target, fs_type="tmpfs"):
                user = subprocess.Popen(["sleep", "60"], cwd=target)
        assert f"pid {user.pid} (sleep): working directory {target}" in str(
            caught.value
        )
        user.kill()
        user.wait(60)
        process_ledger().undo(process_ledger().entries()[0])
        assert target not in targets()

    def test_options_are_those_of_mount(self, target: Path) -> None:
        """The last one of several counts; the others are the file system's."""
        words = "defaults,noexec,noatime,nodev,suid,exec,relatime,size=64k".split(",")
        with mounted("none", target, fs_type="tmpfs", options=words):
            found = os.statvfs(target)
            assert found.f_flag & os.ST_NODEV and found.f_flag & os.ST_RELATIME
            assert not found.f_flag & (os.ST_NOEXEC | os.ST_NOATIME | os.ST_NOSUID)
            assert found.f_blocks * found.f_frsize == 64 << 10

    def test_unmounted_by_someone_else_is_fine(self, target: Path) -> None:
        with mounted("none", target, fs_type="tmpfs") as mount:
            run(["umount", target], timeout_s=10)
            with pytest.raises(LeftoverError, match="unmounted by someone else"):
                mount.info()

    def test_someone_elses_mount_in_its_place_is_left(self, target: Path) -> None:
        with mounted("none", target, fs_type="tmpfs"):
            run(["umount", target], timeout_s=10)
            run(["mount", "-t", "tmpfs", "none", target], timeout_s=10)
        assert target in targets()
        run(["umount", target], timeout_s=10)

    def test_killed_before_its_number_was_noted(self, target: Path) -> None:
        with mounted("none", target, fs_type="tmpfs"):
            (entry,) = process_ledger().entries()
            del entry.details["mount_id"], entry.details["unique_id"]
        assert target not in targets()

    def test_a_directory_with_a_mount_in_it_is_not_emptied(
        self, sparse_path: Path
    ) -> None:
        with pytest.raises(LeftoverError, match="still mounted in it"):
            with tempdir(parent=sparse_path) as directory:
                target = directory / "mnt"
                target.mkdir()
                run(["mount", "-t", "tmpfs", "none", target], timeout_s=10)
                (target / "precious").touch()
        assert (target / "precious").exists()
        run(["umount", target], timeout_s=10)
        process_ledger().undo(process_ledger().entries()[0])

    def test_a_busy_mount_elsewhere_keeps_what_it_stands_on(
        self, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The image below it, above all, in a directory that has no mount in it."""
        monkeypatch.setattr(module, "_BUSY_TIMEOUT_S", 0.2)
        target = sparse_path / "mnt"
        target.mkdir()
        with pytest.raises(LeftoverError, match="still mounted and busy"):
            with tempdir(parent=sparse_path) as directory:
                image = directory / "image"
                with image.open("xb") as file:
                    file.truncate(128 << 20)
                run(["mkfs.btrfs", "-q", image], timeout_s=60)
                with loop_device(image) as device, mounted(device.path, target):
                    user = subprocess.Popen(["sleep", "60"], cwd=target)
        left = [entry.kind for entry in process_ledger().entries()]
        exists = image.exists()
        user.kill()
        user.wait(60)
        outcomes = process_ledger().sweep()
        assert left == ["tempdir", "loop", "mount"] and exists
        assert [outcome.result for outcome in outcomes] == ["removed"] * 3


class TestTempdir:
    def test_it_stays_while_a_loop_device_stands_on_a_file_in_it(
        self, sparse_path: Path
    ) -> None:
        """Anybody's; and what is mounted from that may be elsewhere."""
        with pytest.raises(LeftoverError, match="/dev/loop[0-9]+ is on .*/image"):
            with tempdir(parent=sparse_path) as directory:
                image = directory / "image"
                image.write_bytes(bytes(1 << 20))
                find = run(["losetup", "--find", "--show", image], timeout_s=10)
        assert image.exists()
        run(["losetup", "-d", find.stdout.strip()], timeout_s=10)
        # A program that looks at each new device, as udev does, keeps it meanwhile.
        wait_until(
            lambda: not loops_below(sparse_path), timeout_s=60, what="no loop device"
        )
        process_ledger().undo(process_ledger().entries()[0])

    def test_it_is_private_and_goes_away(self, sparse_path: Path) -> None:
        with tempdir(parent=sparse_path, prefix="x-") as directory:
            assert directory.stat().st_mode & 0o777 == 0o700
            assert directory.name.startswith("x-")
            (directory / "sub").mkdir()
            (directory / "sub" / "file").touch()
            (directory / "link").symlink_to("/etc")
        assert not directory.exists() and Path("/etc/passwd").exists()

    def test_another_directory_of_that_name_is_left(self, sparse_path: Path) -> None:
        with pytest.raises(LeftoverError, match="another directory"):
            with tempdir(parent=sparse_path) as directory:
                directory.rename(directory.with_name("ours"))
                directory.mkdir()
        directory.rmdir()
        directory.with_name("ours").rename(directory)
        process_ledger().undo(process_ledger().entries()[0])

    def test_a_link_in_its_place_is_left(self, sparse_path: Path) -> None:
        with pytest.raises(LeftoverError, match="was not made by this program"):
            with tempdir(parent=sparse_path) as directory:
                os.rmdir(directory)
                directory.symlink_to("/etc")
        directory.unlink()
        process_ledger().undo(process_ledger().entries()[0])
