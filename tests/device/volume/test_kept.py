"""Kept volumes, with each front end: down and up, what stays, what is refused."""

import fcntl
import os
import sqlite3
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from support.disks import MAKE, mounted_disk
from support.needs import Need, inapplicable
from support.paths import TESTS
from support.shells import pattern
from support.volumes import CONTENT_BYTES, NAME, Place
from support.web_servers import response, scripted_server

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, UBLK
from btrfs_ublk.base.ledger import boot_id
from btrfs_ublk.base.process import run
from btrfs_ublk.device import add_device, remove_device, show_device
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, UsageError
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.read_ahead import get_read_ahead
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.kernel.waiting import wait_until
from btrfs_ublk.server import Description, FrontEndName, PatternSegment
from btrfs_ublk.units import GIB, KIB, MIB
from btrfs_ublk.volume import (
    VolumeFile,
    down_volume,
    kept_volume,
    list_volumes,
    remove_volume,
    show_volume,
    up_volume,
)
from btrfs_ublk.volume.files import opened_top, opened_virtual_data
from btrfs_ublk.volume.store import volume_directory

pytestmark = pytest.mark.usefixtures("in_process")

#: linux/fs.h; XFS and ext4 had it first.
_FS_IOC_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2

#: For what has nothing to do with the front end: the VM is slow.
fuse_only = pytest.mark.parametrize(
    "front_end", [pytest.param("fuse", marks=[pytest.mark.fuse])]
)


@pytest.fixture
def place(need: Need, front_end: FrontEndName, sparse_path: Path) -> Iterator[Place]:
    need(UBLK if front_end == "ublk" else FUSE)
    found = Place(sparse_path, front_end)
    yield found
    found.take_all_down()


@pytest.mark.data
def test_down_and_up_again(place: Place) -> None:
    """The same data: what was fetched, written, removed."""
    definition = place.definition("one", "two")
    seen = []
    for turn in range(2):
        with kept_volume(NAME, definition if turn == 0 else None, base=place.base) as v:
            assert v.is_up and v.mount == place.target and v.reason is None
            assert get_read_ahead(place.target) == 64 * KIB
            seen.append((v.fsid, (place.target / "dir").stat().st_ino))
            assert place.matches("two")
            if turn == 0:
                (place.target / "mine").write_text("written")
                with (place.target / "dir/two").open("r+b") as file:
                    file.write(place.content("two").read_bytes()[:1])
                (place.target / "dir/one").unlink()
        assert not place.target.exists() and place.state() == "down"
    with kept_volume(NAME, definition, base=place.base) as found:
        assert seen[0] == seen[1] == (found.fsid, seen[0][1])
        assert (place.target / "mine").read_text() == "written"
        # What its user has removed stays so.
        assert [file.present for file in found.files] == [False, True]
        # Nor does it come back, or change, when it is up.
        assert up_volume(NAME, definition, base=place.base) == found
    remove_volume(NAME, base=place.base)
    assert list_volumes(base=place.base) == []


@fuse_only
def test_an_empty_object_is_an_empty_file(place: Place) -> None:
    """Of a server, and on this machine: it is asked for once."""
    (place.root / "void").touch()
    with scripted_server(
        lambda _: response("416 No\nContent-Range: bytes */0")
    ) as server:
        void = VolumeFile.parse(f"dir/void={place.root / 'void'}")
        files = (*place.definition("one").files, void)
        files += (VolumeFile.parse(f"nothing={server.url()}"),)
        definition = place.definition(files=files)
        with kept_volume(NAME, definition, base=place.base) as found:
            assert [x.size_bytes for x in found.files] == [CONTENT_BYTES, 0, 0]
            assert place.matches("one")
            (place.target / "nothing").write_text("written")
        assert len(server.requests) == 1
        with kept_volume(NAME, definition, base=place.base):
            assert (place.target / "nothing").read_text() == "written"
            assert (place.target / "dir/void").read_bytes() == b""
        assert len(server.requests) == 1


@pytest.mark.data
@fuse_only
def test_what_could_not_be_cloned_is_free_again(place: Place) -> None:
    content = place.content("one")
    too_long = VolumeFile.parse(f"{'n' * 256}={content}")
    with kept_volume(NAME, place.definition("one"), base=place.base):
        before = show_volume(NAME, base=place.base)
        first = VolumeFile.parse(f"new/two={content}")
        failing = place.definition("one", files=(first, too_long))
        with pytest.raises(BtrfsUblkError, match="too long"):
            up_volume(NAME, failing, base=place.base)
        assert not (place.target / "new").exists()
        assert show_volume(NAME, base=place.base).files == before.files
        # From elsewhere; and a name may be as long as btrfs lets it be.
        other = VolumeFile.parse(f"new/two={place.content('two')}")
        long = VolumeFile.parse(f"{'n' * 255}={content}")
        up_volume(NAME, place.definition(files=(other, long)), base=place.base)
        made = (place.target / "new/two").read_bytes()
        assert made == place.content("two").read_bytes()
        assert (place.target / long.path).read_bytes() == content.read_bytes()


@pytest.mark.usefixtures("short_waits")
def test_down_names_who_uses_it(place: Place) -> None:
    volume = volume_directory(NAME, place.base)
    up_volume(NAME, place.definition("one"), base=place.base)
    with (place.target / "dir/one").open("rb") as file:
        with pytest.raises(LeftoverError, match=f"{os.getpid()}"):
            down_volume(NAME, base=place.base)
        assert place.state() == "up"
        assert file.read(77) == place.content("one").read_bytes()[:77]
    with opened_top(volume, place.target) as top:
        with opened_virtual_data(volume, top) as virtual, virtual.open("rb") as opened:
            user = subprocess.Popen(["sleep", "300"], stdin=opened)
    try:
        with pytest.raises(LeftoverError, match=f"pid {user.pid} .*no path leads to"):
            down_volume(NAME, base=place.base)
    finally:
        user.kill()
        user.wait(timeout=60)
    loops = [device for device, _ in loops_below(place.root)]
    if place.front_end == "fuse":
        loops.append(show_volume(NAME, base=place.base).device or Path())
    for device in loops:
        with device.open("rb") as opened:
            user = subprocess.Popen(["sleep", "300"], stdin=opened)
        try:
            with pytest.raises(LeftoverError, match=f"still up.*has open {device}"):
                down_volume(NAME, base=place.base)
        finally:
            user.kill()
            user.wait(timeout=60)
        assert place.state() == "up" and place.matches("one")
    again = place.root / "again"
    again.mkdir()
    run(["mount", "--bind", place.target, again], timeout_s=60)
    with pytest.raises(LeftoverError, match=f"mounted at {again} as well"):
        down_volume(NAME, base=place.base)
    assert place.state() == "up" and place.matches("one")
    run(["umount", again], timeout_s=60)
    with pytest.raises(LeftoverError, match="is up and was not removed"):
        remove_volume(NAME, base=place.base)
    assert down_volume(NAME, base=place.base)
    assert not down_volume(NAME, base=place.base)


def in_a_namespace(propagation: str) -> subprocess.Popen[bytes]:
    """Somebody who has got copies of all mounts."""
    user = subprocess.Popen(
        ["unshare", "-m", "--propagation", propagation, "sh", "-c", "echo; read x"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert user.stdout is not None and user.stdout.readline()
    return user


@pytest.mark.usefixtures("short_waits")
@fuse_only
def test_down_names_who_has_it_in_another_namespace(place: Place) -> None:
    shared = place.root / "shared"
    shared.mkdir()
    target = shared / "mnt"
    run(["mount", "--bind", shared, shared], timeout_s=60)
    users = []
    try:
        run(["mount", "--make-shared", shared], timeout_s=60)
        up_volume(NAME, place.definition("one", mount=target), base=place.base)
        users += [in_a_namespace("slave"), in_a_namespace("private")]
        with pytest.raises(LeftoverError) as refused:
            down_volume(NAME, base=place.base)
        assert f"pid {users[1].pid} (sh) at {target}" in refused.value.message
        # The other one's goes along.
        assert f"pid {users[0].pid} " not in refused.value.message
        assert place.state() == "up"
        users[1].communicate(timeout=60)
        assert down_volume(NAME, base=place.base) and place.state() == "down"
        assert users[0].poll() is None
    finally:
        for user in users:
            user.communicate(timeout=60)
        place.take_all_down()
        run(["umount", shared], timeout_s=60)


@fuse_only
def test_somebody_else_unmounts_it(place: Place) -> None:
    up_volume(NAME, place.definition("one"), base=place.base)
    run(["umount", place.target], timeout_s=60)
    wait_until(
        lambda: not loops_below(place.root), timeout_s=60, what="its loop device stays"
    )
    assert place.state() == "broken"
    assert up_volume(NAME, place.definition("one"), base=place.base).is_up
    assert place.matches("one")


@pytest.mark.usefixtures("short_waits")
@fuse_only
def test_a_frozen_one_stays_up(place: Place) -> None:
    """An unmount would leave a frozen file system in use, and out of sight."""
    with kept_volume(NAME, place.definition(), base=place.base):
        pass
    seed = volume_directory(NAME, place.base).seed_image
    with (
        loop_device(seed, read_only=True),  # it has a lower number
        kept_volume(NAME, place.definition(), base=place.base),
    ):
        for unmounted in (False, True):
            run(["fsfreeze", "--freeze", place.target], timeout_s=10)
            if unmounted:
                run(["umount", place.target], timeout_s=10)
                assert place.state() == "broken"
                with pytest.raises(LeftoverError, match="it is frozen"):
                    up_volume(NAME, place.definition(), base=place.base)
            with pytest.raises(LeftoverError, match="it is frozen") as refused:
                down_volume(NAME, base=place.base)
            assert f"fsfreeze --unfreeze {place.target}," in (refused.value.hint or "")
            assert place.target.is_mount()
            run(["fsfreeze", "--unfreeze", place.target], timeout_s=10)
            assert place.state() == "up"
    assert place.state() == "down"


@pytest.mark.usefixtures("short_waits")
@fuse_only
def test_one_that_its_user_made_read_only(place: Place) -> None:
    """It is made writable by the next up, but not by a down that fails."""
    with kept_volume(NAME, place.definition(), base=place.base):
        run(["mount", "-o", "remount,ro", place.target], timeout_s=10)
        assert place.state() == "broken"
        up_volume(NAME, place.definition(), base=place.base)
        (place.target / "mine").write_text("written")
        run(["mount", "-o", "remount,ro", place.target], timeout_s=10)
        used = os.open(place.target, os.O_RDONLY)
        with pytest.raises(LeftoverError, match="still up"):
            down_volume(NAME, base=place.base)
        os.close(used)
        mounts = [x for x in read_mountinfo() if x.target == place.target]
        assert [x.fs_read_only for x in mounts] == [True]


def test_one_that_was_shut_down(place: Place) -> None:
    """`up` says so, and what was synced is there after `down` and `up`."""
    with kept_volume(NAME, place.definition(), base=place.base):
        with (place.target / "mine").open("w") as file:
            file.write("written")
            file.flush()
            os.fsync(file.fileno())
            try:
                fcntl.ioctl(file, _FS_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
            except OSError:
                inapplicable("this kernel cannot shut a btrfs down")
        with pytest.raises(LeftoverError, match="takes no changes") as refused:
            up_volume(NAME, place.definition(), base=place.base)
        assert f"volume down {NAME}" in str(refused.value.hint)
        down_volume(NAME, base=place.base)
        up_volume(NAME, place.definition(), base=place.base)
        assert (place.target / "mine").read_text() == "written"


@fuse_only
def test_devices_that_others_have_changed_are_named(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    def changed(command: list[object], told: str) -> None:
        run(["btrfs", *command, place.target], timeout_s=60)
        reason = show_volume(NAME, base=place.base).reason or ""
        assert told in reason and str(place.target) in reason
        with pytest.raises(LeftoverError, match=told):
            up_volume(NAME, place.definition(), base=place.base)

    (more := place.root / "more").touch()
    os.truncate(more, GIB)
    image = volume_directory(NAME, place.base).sprout_image
    with loop_device(more) as other:
        with kept_volume(NAME, place.definition(), base=place.base):
            changed(["device", "add", "-f", other.path], f"has {other.path}, which")
            down_volume(NAME, base=place.base)
    with pytest.raises(BtrfsUblkError, match="has 3 devices, and the volume knows 2"):
        up_volume(NAME, place.definition(), base=place.base)
    with loop_device(more) as other:
        run(["btrfs", "device", "scan", other.path], timeout_s=60)
        up_volume(NAME, place.definition(), base=place.base)
        assert f"has {other.path}, which" in caplog.text
        run(["btrfs", "device", "remove", other.path, place.target], timeout_s=60)
        assert place.state() == "up"
        replace_it: list[object] = ["replace", "start", "-B", "-f", "2", other.path]
        changed(replace_it, f"has {other.path} in place of {image}")
        down_volume(NAME, base=place.base)
        with pytest.raises(BtrfsUblkError, match=f"{image} holds no btrfs any more"):
            up_volume(NAME, place.definition(), base=place.base)


@fuse_only
def test_a_copy_leaves_its_original_alone(place: Place) -> None:
    """One that was made while the original was up has its session and its ledgers."""
    with kept_volume(NAME, place.definition("one"), base=place.base):
        copy = place.base / "copy"
        run(["cp", "-a", "--sparse=always", place.base / NAME, copy], timeout_s=60)
        assert show_volume("copy", base=place.base).state == "down"
        with pytest.raises(LeftoverError, match=rf"mounted already \({place.target}"):
            up_volume("copy", place.definition("one"), base=place.base)
        assert not down_volume("copy", base=place.base)
        assert place.state() == "up" and place.matches("one")
        remove_volume("copy", base=place.base)
        # It is no copy where overlayfs has given the directory other numbers.
        volume = volume_directory(NAME, place.base)
        session = volume.session()
        assert session is not None
        volume.write_session(replace(session, directory="1:2"))
        assert place.state() == "up"
        assert down_volume(NAME, base=place.base)
    assert place.state() == "down"


@pytest.mark.data
@fuse_only
def test_after_a_loss_of_power(place: Place) -> None:
    """What is on disk while it is up, and nothing else, comes up again."""
    definition = place.definition("one", "two")
    lost = place.root / "lost"
    with kept_volume(NAME, definition, base=place.base):
        (place.target / "mine").write_text("written")
        run(["sync", "--file-system", place.target], timeout_s=60)
        run(["cp", "-a", "--sparse=always", place.base, lost], timeout_s=60)
    for path in (lost / NAME / "session.json", *(lost / NAME / "ledgers").iterdir()):
        path.write_text(path.read_text().replace(boot_id(), str(UUID(int=0))))
    with kept_volume(NAME, base=lost):
        assert (place.target / "mine").read_text() == "written"
        assert place.matches("one") and place.matches("two")
        up_volume(NAME, place.definition("one", "three"), base=lost)
        assert place.matches("three")
    assert show_volume(NAME, base=lost).state == "down"


@fuse_only
def test_its_sources_have_another_device_number(place: Place, tmp_path: Path) -> None:
    """As after a reboot: btrfs has the number that is free when it is mounted. Maps of
    earlier versions have the one of then in a file's identity."""
    disk, at = place.root / "disk", tmp_path / "at"
    disk.touch()
    os.truncate(disk, 256 * MIB)
    run([*MAKE["btrfs"], disk], timeout_s=60)
    at.mkdir()
    file = VolumeFile("data", {"kind": "file", "path": str(at / "data")})
    content = os.urandom(CONTENT_BYTES)
    with mounted_disk(disk, at, "btrfs"):
        (at / "data").write_bytes(content)
        before = (at / "data").stat().st_dev
        with kept_volume(NAME, place.definition(files=(file,)), base=place.base):
            assert (place.target / "data").open("rb").read(1) == content[:1]
    with closing(sqlite3.connect(place.base / NAME / "map")) as map_file, map_file:
        change = "UPDATE identities SET identity = 'device 0:1 ' || identity"
        map_file.execute(change)
    with ExitStack() as stack:
        for number in range(64):  # others may give numbers back meanwhile
            (tmp_path / str(number)).mkdir()
            taken = tmp_path / str(number)
            stack.enter_context(mounted("none", taken, fs_type="tmpfs"))
            with ExitStack() as again:
                again.enter_context(mounted_disk(disk, at, "btrfs"))
                if (at / "data").stat().st_dev != before:
                    stack.push(again.pop_all())
                    break
        assert (at / "data").stat().st_dev != before
        with kept_volume(NAME, base=place.base):
            assert (place.target / "data").read_bytes() == content
            done = place.command("verify", NAME, "--ask", noun="map")
            assert done.returncode == 0, done.stdout + done.stderr


@fuse_only
def test_a_device_of_its_name_is_left_alone(place: Place) -> None:
    pattern = Description(MIB, [PatternSegment(offset=0, length=MIB)])
    add_device(NAME, pattern)
    try:
        with pytest.raises(UsageError, match="does not belong to this volume"):
            up_volume(NAME, place.definition(), base=place.base)
        assert show_device(NAME).is_well
        assert list_volumes(base=place.base) == []
    finally:
        remove_device(NAME)


FORMATS = TESTS / "support/formats"


@pytest.mark.fuse
@pytest.mark.parametrize("commit", ["46cece7", "9e50625"])
def test_one_of_an_earlier_version(need: Need, sparse_path: Path, commit: str) -> None:
    """Archives in support/formats/ were written by programs of these commits: all that
    `volume up` and `down` have left, with a written file, and one of virtual data."""
    need(ROOT, BTRFS, LOOP, FUSE)
    with tarfile.open(FORMATS / f"volume-{commit}.tar.xz") as archive:
        archive.extractall(sparse_path, filter="tar")  # with the modes that it has
    base, mount = sparse_path / "volumes", sparse_path / "mnt"
    base.chmod(0o700)
    definition = replace(volume_directory("old", base).definition(), mount=mount)
    with kept_volume("old", definition, base=base):
        assert (mount / "written").read_text() == "written by an earlier version\n"
        assert (mount / "virtual").read_bytes() == pattern(131072)
        (mount / "new").write_text("written by this version\n")
    with kept_volume("old", base=base):
        assert (mount / "new").read_text() == "written by this version\n"
