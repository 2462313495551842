"""Forks of a sealed image, as snapshots and as overlays: what is read, who sees what,
what is refused, and that they are removed. The volume stays up all the while."""

import fcntl
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.processes import killed_at_event
from support.trees import GRANTING_ACL
from support.volumes import BIG, NAME, Place, each_mode, fetched_bytes, fork, up

from btrfs_ublk.base.signals import deferred, interruptible
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, UsageError
from btrfs_ublk.kernel.btrfs import commit_transaction, create_snapshot, filesystem_uuid
from btrfs_ublk.kernel.mount import mount_now, unmount_now
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume import ForkMode, apply_delta, fork_image
from btrfs_ublk.volume import forks as fork_module
from btrfs_ublk.volume import forks_of_image, unfork_image, write_delta
from btrfs_ublk.volume.device import find_device
from btrfs_ublk.volume.mounts import mounts_of
from btrfs_ublk.volume.store import volume_directory

pytestmark = pytest.mark.data


@pytest.fixture
def place(shared: Place) -> Place:
    """It is up for all tests of this file."""
    return shared


def test_only_readers_of_data_fetch_them(place: Place) -> None:
    """No data come by mount, lists, quotas, forks, clones, first writes, or a delta."""
    top = place.target
    subprocess.run(["ls", "-lR", top], check=True, stdout=subprocess.DEVNULL)
    path = fork(place, "one", "snapshot", quota_bytes=MIB)
    with open(path / "clone", "wb") as new, open(path / "big", "rb") as old:
        fcntl.ioctl(new.fileno(), 0x40049409, old.fileno())  # FICLONE
    with open(path / "big", "r+b") as file:
        os.pwrite(file.fileno(), b"x" * 4 * KIB, MIB)
    commit_transaction(top)
    (layer,) = (top / "layers").iterdir()
    read_only = top / "read-only"
    argv = ["btrfs", "subvolume", "snapshot", "-r", path, read_only]
    subprocess.run(argv, check=True, capture_output=True)
    argv = ["btrfs", "send", "-q", "-p", layer, read_only]
    delta = subprocess.run(argv, check=True, capture_output=True).stdout
    assert b"x" * 4 * KIB in delta and len(delta) < len(BIG) // 8
    assert fetched_bytes(place) == 0
    assert (path / "big").read_bytes()[: 64 * KIB] == BIG[: 64 * KIB]
    assert fetched_bytes(place) > 0
    argv = ["btrfs", "subvolume", "delete", read_only]
    subprocess.run(argv, check=True, capture_output=True)


@each_mode
def test_a_fork_can_be_written_to_and_fetches_nothing(
    place: Place, mode: ForkMode
) -> None:
    before = fetched_bytes(place)
    one, two = fork(place, "one", mode), fork(place, "two", mode)
    with open(one / "big", "r+b") as file:
        os.pwrite(file.fileno(), b"x" * 4 * KIB, MIB)
    (one / "etc/motd").write_text("changed\n")
    (one / "etc/3").unlink()
    with open(one / "clone", "wb") as new, open(one / "big", "rb") as old:
        fcntl.ioctl(new.fileno(), 0x40049409, old.fileno())  # FICLONE
    commit_transaction(place.target)
    assert fetched_bytes(place) == before
    expected = BIG[:MIB] + b"x" * 4 * KIB + BIG[MIB + 4 * KIB :]
    assert (one / "clone").read_bytes() == (one / "big").read_bytes() == expected
    assert (two / "big").read_bytes() == BIG
    assert (two / "etc/motd").read_text() == "hello\n"
    assert (two / "etc/3").exists() and not (one / "etc/3").exists()
    top = one.stat()
    assert (top.st_mode & 0o7777, top.st_uid, top.st_gid) == (0o2750, 3, 4)
    assert os.getxattr(one, "user.of") == b"top"


@each_mode
def test_a_fork_grants_no_more_access_than_the_image(
    place: Place, mode: ForkMode
) -> None:
    """What is made in the image's tree would inherit its default ACL."""
    one = fork(place, "one", mode)
    assert "system.posix_acl_access" not in os.listxattr(one)
    assert os.getxattr(one, "system.posix_acl_default") == GRANTING_ACL
    argv = ["cat", "etc/motd"]
    refused = subprocess.run(
        argv, cwd=one, user=1000, group=1000, extra_groups=[], capture_output=True
    )
    assert refused.returncode == 1 and b"Permission denied" in refused.stderr
    # New files and directories inherit what they inherit in the image.
    (one / "new").mkdir()
    (one / "new/file").touch()
    (one / "file").touch()
    for each in (one / "new", one / "new/file", one / "file"):
        assert b"\xe8\x03" in os.getxattr(each, "system.posix_acl_access")
        assert each.stat().st_gid == 4


@each_mode
def test_no_fork_looks_at_all_others(
    place: Place, mode: ForkMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the thousandth would take longer than the first."""

    def refuse(*_: object, **__: object) -> list[Any]:
        raise AssertionError("all of them are looked at")

    fork(place, "one", mode)
    with monkeypatch.context() as patch:
        patch.setattr("btrfs_ublk.kernel.mountinfo.parse_mountinfo", refuse)
        patch.setattr(fork_module, "list_forks", refuse)
        fork(place, "two", mode)
        fork_image(NAME, "three", source="two", base=place.base)
        fork_module.find_fork(place.target, "three")
    names = [each.name for each in forks_of_image(NAME, base=place.base)]
    assert names == ["one", "three", "two"]


def test_overlays_share_the_page_cache(place: Place) -> None:
    """What one has read, the next does not read from the device."""
    paths = [fork(place, name, "overlay") / "big" for name in ("one", "two")]
    device = find_device(volume_directory(NAME, place.base))
    assert device is not None and device.path is not None
    read_file = Path("/sys/class/block") / device.path.name / "stat"

    def sectors() -> int:
        return int(read_file.read_text().split()[2])

    assert paths[0].read_bytes() == BIG
    before = sectors()
    assert paths[1].read_bytes() == BIG
    assert sectors() == before


def test_up_mounts_what_is_missing(place: Place) -> None:
    one, two = (fork(place, name, "overlay") for name in ("one", "two"))
    (one / "etc/motd").write_text("changed\n")
    unmount_now(one)
    found = forks_of_image(NAME, base=place.base)
    assert [each.is_mounted for each in found] == [False, True]
    with pytest.raises(UsageError, match="already") as taken:
        fork(place, "one", "overlay")
    assert "`btrfs-ublk volume up`" in str(taken.value.hint)
    up(place)
    assert (one / "etc/motd").read_text() == "changed\n"
    fsid = filesystem_uuid(place.target)
    assert [x.target for x in mounts_of(fsid)] == [place.target, two, one]


def test_what_a_killed_command_left_is_removed(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    (layer,) = (place.target / "layers").iterdir()
    fork(place, "zero", "overlay")
    overlays = place.target / "overlays"
    create_snapshot(layer, overlays, "one")
    create_snapshot(layer, overlays, "two")
    fork(place, "one", "overlay")
    up(place)
    assert sorted(os.listdir(overlays)) == ["one", "zero"]
    assert "removed fork two, which a command left half made" in caplog.text
    assert caplog.text.count("removed fork") == 1


def test_a_signal_while_an_overlay_is_mounted(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the overlay is there, which is then taken away."""
    forks, overlays = place.target / "forks", place.target / "overlays"

    def interrupted(*arguments: Any, **more: Any) -> None:
        with deferred():
            signal.raise_signal(signal.SIGHUP)
            mount_now(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(fork_module, "mount_now", interrupted)
        with pytest.raises(KeyboardInterrupt) as raised, interruptible():
            fork(place, "one", "overlay")
        assert not getattr(raised.value, "__notes__", None)
        assert os.listdir(forks) == os.listdir(overlays) == []
    fork(place, "one", "overlay")
    write_delta(NAME, "one", tmp_path / "delta", base=place.base)
    with monkeypatch.context() as patch:
        patch.setattr(fork_module, "mount_now", interrupted)
        with pytest.raises(KeyboardInterrupt), interruptible():
            apply_delta(NAME, tmp_path / "delta", "two", base=place.base)
    assert os.listdir(forks) == os.listdir(overlays) == ["one"]


def test_the_name_of_a_fork_whose_removal_was_killed_is_free(place: Place) -> None:
    for step in ("_unmount", "_discard", "is_subvolume", "delete_subvolumes"):
        check_a_killed_removal(place, step)


def check_a_killed_removal(place: Place, step: str) -> None:
    fork(place, "one", "overlay")
    real, is_begun = getattr(fork_module, step), False
    unmount = fork_module._unmount

    def unmounted(target: Path) -> None:
        nonlocal is_begun
        unmount(target)
        is_begun = True
        if step == "_unmount":
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(*arguments: Any) -> Any:
        done = real(*arguments)
        if is_begun:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    def remove() -> None:
        setattr(fork_module, step, dying)
        fork_module._unmount = unmounted
        fork_module.remove_fork(place.target, "one")

    assert killed_at_event(0, remove)
    if step == "_unmount":  # it is not removed yet
        up(place)
        unfork_image(NAME, "one", base=place.base)
    assert forks_of_image(NAME, base=place.base) == []
    path = fork(place, "one", "overlay")
    assert (path / "etc/motd").read_text() == "hello\n"
    unfork_image(NAME, "one", base=place.base)


@pytest.mark.usefixtures("short_waits")
@each_mode
def test_a_fork_is_removed_with_all_it_has(
    place: Place, tmp_path: Path, mode: ForkMode
) -> None:
    one = fork(place, "one", mode)
    (one / "etc/new").write_text("new")
    bound = tmp_path / "bound"
    bound.mkdir()
    subprocess.run(["mount", "--bind", one, bound], check=True, timeout=60)
    with pytest.raises(LeftoverError, match="it is mounted at .*bound as well"):
        unfork_image(NAME, "one", base=place.base)
    subprocess.run(["umount", bound], check=True, timeout=60)
    unfork_image(NAME, "one", base=place.base)
    assert os.listdir(one.parent) == [] and forks_of_image(NAME, base=place.base) == []
    overlays = place.target / "overlays"
    assert not overlays.exists() or os.listdir(overlays) == []
    with pytest.raises(UsageError, match="no fork 'one'.*"):
        unfork_image(NAME, "one", base=place.base)
    again = fork(place, "one", mode)
    assert not (again / "etc/new").exists()


def test_names_and_places_that_cannot_be(place: Place) -> None:
    with pytest.raises(UsageError, match="cannot have a comma, a colon"):
        fork(place, "a:b", "overlay")
    fork(place, "a:b", "snapshot")
    with pytest.raises(UsageError, match="a:b already"):
        fork(place, "a:b", "snapshot")
    fork(place, "one", "overlay")
    with pytest.raises(UsageError, match="one already"):
        fork(place, "one", "snapshot")
    blocked = place.target / "overlays/two"
    blocked.mkdir()
    with pytest.raises(BtrfsUblkError, match="two already"):
        fork(place, "two", "overlay")
    blocked.rmdir()


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    """What is below our directories is deleted, and mounted over."""
    mount, elsewhere = tmp_path / "mount", tmp_path / "elsewhere"
    (elsewhere / "one").mkdir(parents=True)
    mount.mkdir()
    for name in fork_module.OUR_DIRECTORIES:
        link = mount / name
        link.symlink_to(elsewhere)
        for use in (
            lambda: fork_module.make_fork(mount, "one", tmp_path),
            lambda: fork_module.mount_overlays(mount),
            lambda: fork_module.list_forks(mount),
            lambda: fork_module.remove_fork(mount, "one"),
            lambda link=link: fork_module.make_directory(link, 0o700),
        ):
            with pytest.raises(BtrfsUblkError, match="link to .*/elsewhere, and not"):
                use()
        link.unlink()
    assert os.listdir(elsewhere) == ["one"]
