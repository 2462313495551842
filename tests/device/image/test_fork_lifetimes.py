"""Forks of a sealed image when their volume goes down and comes up again, their quotas,
and images that are detached: each test has a volume of its own."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.volumes import (
    BIG,
    NAME,
    SMALL_FILES,
    Place,
    each_mode,
    fetched_bytes,
    fork,
    killed_at,
    up,
)

from btrfs_ublk.errors import BtrfsUblkError, CapabilityError, LeftoverError, UsageError
from btrfs_ublk.kernel.btrfs import (
    commit_transaction,
    create_subvolume,
    filesystem_uuid,
)
from btrfs_ublk.kernel.mount import unmount_now
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume import (
    FORK_MODES,
    ForkMode,
    apply_delta,
    detach_image,
    diff_fork,
    down_volume,
    fork_image,
)
from btrfs_ublk.volume import forks as fork_module
from btrfs_ublk.volume import forks_of_image, remove_volume, unfork_image, write_delta
from btrfs_ublk.volume.mounts import mounts_of
from btrfs_ublk.volume.store import volume_directory

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("in_process")]


@contextmanager
def using(directory: Path, *before: str) -> Iterator[int]:
    """Run a process whose working directory is this one."""
    process = subprocess.Popen(
        [*before, "sh", "-c", "echo ready; exec sleep 100"],
        cwd=directory,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_forks_are_kept(place: Place) -> None:
    forks = {mode: fork(place, mode, mode) for mode in FORK_MODES}
    for one in forks.values():
        (one / "etc/motd").write_text("changed\n")
        (one / "etc/3").unlink()
    up(place)  # changes nothing
    assert {(one / "etc/motd").read_text() for one in forks.values()} == {"changed\n"}
    for _ in range(2):
        assert down_volume(NAME, base=place.base)
        assert not any(map(os.path.lexists, forks.values()))
        up(place)
        for one in forks.values():
            assert (one / "etc/motd").read_text() == "changed\n"
            assert not (one / "etc/3").exists() and (one / "etc/4").exists()
    (layer,) = (place.target / "layers").iterdir()
    found = forks_of_image(NAME, base=place.base)
    assert {each.mode: each.path for each in found} == forks
    for each in found:
        assert (each.name, each.layer, each.is_mounted) == (each.mode, layer, True)
        assert each.used_bytes is None and each.quota_bytes is None


@each_mode
def test_a_fork_of_a_fork_is_its_moment(place: Place, mode: ForkMode) -> None:
    """It is kept when the other one goes, and both are committed and compared."""
    one = fork(place, "one", mode)
    (one / "etc/motd").write_text("changed\n")
    (one / "etc/3").unlink()
    with (one / "new").open("w") as file:  # it is in use, and not on disk
        file.write("one\n")
        file.flush()
        two = fork_image(NAME, "two", source="one", base=place.base)
    (one / "new").write_text("later\n")
    (two / "etc/4").unlink()
    three = fork_image(NAME, "three", source="two", base=place.base)
    unfork_image(NAME, "one", base=place.base)
    unfork_image(NAME, "two", base=place.base)
    down_volume(NAME, base=place.base)
    up(place)
    assert (three / "etc/motd").read_text() == "changed\n"
    assert (three / "new").read_text() == "one\n"
    (layer,) = (place.target / "layers").iterdir()
    (found,) = forks_of_image(NAME, base=place.base)
    assert (found.name, found.mode, found.layer) == ("three", mode, layer)
    (three / "etc").chmod(0o700)
    expected = [
        *(("removed", "/etc/3"), ("removed", "/etc/4")),
        *(("changed", "/etc"), ("changed", "/etc/motd"), ("added", "/new")),
    ]
    told = diff_fork(NAME, "three", base=place.base)
    assert sorted(told) == sorted((how, Path(path)) for how, path in expected)
    write_delta(NAME, "three", place.root / "delta", base=place.base)
    four = apply_delta(NAME, place.root / "delta", "four", base=place.base)
    assert not (four / "etc/4").exists() and (four / "new").read_text() == "one\n"
    unfork_image(NAME, "three", base=place.base)
    with pytest.raises(UsageError, match="no fork 'three'.*"):
        fork_image(NAME, "five", source="three", base=place.base)
    assert fork_image(NAME, "three", source="four", base=place.base) == three


def test_a_fork_of_a_fork_that_was_killed_is_not_in_the_way(place: Place) -> None:
    one = fork(place, "one", "snapshot")
    create_subvolume(one, "nested")
    (one / "nested/x").write_text("x\n")
    again = f"volume.fork_image('{NAME}', 'two', source='one', base={place.base!r})"
    killed_at("kernel.btrfs:create_snapshot", again, call=2)
    assert [x.name for x in forks_of_image(NAME, base=place.base)] == ["one"]
    two = fork_image(NAME, "two", source="one", base=place.base)
    assert (two / "nested/x").read_text() == "x\n"
    assert not os.listdir(place.target / "commits")


@each_mode
def test_what_takes_the_place_of_a_directory_or_link_is_told(
    place: Place, mode: ForkMode
) -> None:
    """The link of the layer leads to a directory of the host, which nobody reads."""
    one = fork(place, "one", mode)
    (one / "alias").unlink()
    (one / "alias").mkdir()
    (one / "alias/passwd").touch()
    shutil.rmtree(one / "srv")
    (one / "srv/data").mkdir(parents=True)
    (one / "srv/data/new").touch()
    told = diff_fork(NAME, "one", base=place.base)
    assert sorted((how, str(path)) for how, path in told) == [
        *(("added", "/alias/passwd"), ("added", "/srv/data/new")),
        *(("changed", "/alias"), ("changed", "/srv"), ("changed", "/srv/data")),
        ("removed", "/srv/data/old"),
    ]


def test_work_in_a_fork_fetches_what_it_reads(place: Place) -> None:
    """No data of the image come by changes of owners, or by new files."""
    before = fetched_bytes(place)
    one = fork(place, "one", "overlay")
    for words in (["chown", "-R", "1000:1000"], ["chmod", "-R", "u+w"]):
        subprocess.run([*words, one], check=True, timeout=60)
    (one / "usr/lib").mkdir(parents=True, exist_ok=True)
    for number in range(100):  # as a package manager does
        (one / f"usr/lib/{number}.new").write_bytes(os.urandom(4 * KIB))
        (one / f"usr/lib/{number}.new").rename(one / f"usr/lib/{number}")
    commit_transaction(place.target)
    two = fork_image(NAME, "two", source="one", base=place.base)
    write_delta(NAME, "two", place.root / "delta", base=place.base)
    assert ("added", Path("/usr/lib/7")) in diff_fork(NAME, "two", base=place.base)
    assert fetched_bytes(place) == before
    assert (two / "big").stat().st_uid == 1000
    assert (two / "big").read_bytes() == BIG
    assert fetched_bytes(place) > before


@pytest.mark.parametrize("many", [1, 0])
def test_new_files_of_an_overlay_have_inode_numbers_of_their_own(
    place: Place, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides have one device number, so `cp` and `mv` would take two files with
    the same number for one. Also where there are many, and after they were mounted."""
    monkeypatch.setattr(fork_module, "MANY_OVERLAYS", many)
    fork(place, "one", "overlay")
    down_volume(NAME, base=place.base)
    up(place)
    unfork_image(NAME, "one", base=place.base)
    one = fork(place, "one", "overlay")
    assert (place.target / "overlays/one/big").exists() == bool(many)
    old = {path.lstat().st_ino for path in one.rglob("*")}
    for number in range(3 * SMALL_FILES):
        (one / f"new-{number}").write_text("new")
    new = {path.lstat().st_ino for path in one.glob("new-*")}
    assert len(new) == 3 * SMALL_FILES and not old & new
    assert len({path.lstat().st_dev for path in one.iterdir() if path.is_file()}) == 1
    for path in sorted((one / "etc").iterdir()):
        shutil.copyfile(one / "new-0", path)
        assert path.read_text() == "new"


def test_one_broken_overlay_stops_no_other(place: Place) -> None:
    fork(place, "one", "overlay")
    two = fork(place, "two", "overlay")
    for name in ("one", "two"):
        unmount_now(place.target / "forks" / name)
    fork_module.upper_of(place.target, "one").rmdir()
    up(place)
    assert (two / "etc/motd").read_text() == "hello\n"
    unfork_image(NAME, "one", base=place.base)
    assert not os.path.lexists(place.target / "overlays/one")


def test_an_overlay_is_durable_when_it_is_made(place: Place) -> None:
    """What lies on the disk at this moment is what there is after a power loss."""
    fork(place, "one", "overlay")
    disk = volume_directory(NAME, place.base).sprout_image
    copy = place.root / "after-power-loss.img"
    subprocess.run(["cp", "--sparse=always", disk, copy], check=True, timeout=60)
    down_volume(NAME, base=place.base)
    subprocess.run(["cp", "--sparse=always", copy, disk], check=True, timeout=60)
    up(place)
    (found,) = forks_of_image(NAME, base=place.base)
    assert (found.name, found.mode, found.is_mounted) == ("one", "overlay", True)
    assert (found.path / "etc/motd").read_text() == "hello\n"


@pytest.mark.usefixtures("short_waits")
def test_down_says_who_uses_a_fork_and_undoes_nothing(place: Place) -> None:
    one, two = (fork(place, name, "overlay") for name in ("one", "two"))
    with using(one / "etc") as pid:
        with pytest.raises(LeftoverError, match=f"pid {pid} .*forks/one/etc"):
            down_volume(NAME, base=place.base)
        assert (two / "etc/motd").exists()
        with pytest.raises(LeftoverError, match=f"was not removed: .*pid {pid} "):
            unfork_image(NAME, "one", base=place.base)
        unfork_image(NAME, "two", base=place.base)
    unshare = ("unshare", "--mount", "--propagation", "private")
    with using(Path("/"), *unshare) as pid:
        with pytest.raises(LeftoverError, match=f"another mount namespace.*{pid}"):
            down_volume(NAME, base=place.base)
        with pytest.raises(LeftoverError, match=f"was not removed: pid {pid} "):
            unfork_image(NAME, "one", base=place.base)
    assert down_volume(NAME, base=place.base)


def test_down_waits_for_users_that_go_and_that_come_late(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of another volume has copies of mounts for a moment, when it starts.
    Others come when it has looked for users, and when some overlays are gone."""
    one, two, three = (fork(place, x, "overlay") for x in ("one", "two", "three"))

    def copy_mounts() -> subprocess.Popen[bytes]:
        words = "echo ready; exec sleep 0.3"
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", words],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        return process

    with copy_mounts():
        unfork_image(NAME, "three", base=place.base)
    with copy_mounts():
        assert down_volume(NAME, base=place.base)
    up(place)
    monkeypatch.setattr("btrfs_ublk.volume.down.wait_for_users", lambda *_, **__: [])
    with using(one / "etc") as pid:
        with pytest.raises(LeftoverError, match=f"is still up: .*pid {pid} "):
            down_volume(NAME, base=place.base)
        fsid = filesystem_uuid(place.target)
        there = {each.target for each in mounts_of(fsid, fs_type="overlay")}
        assert there == {one, two} and not os.path.lexists(three)
        assert (two / "etc/motd").read_text() == "hello\n"
    with subprocess.Popen(["sleep", "0.3"], cwd=one):
        assert down_volume(NAME, base=place.base)


def test_quotas_are_right_to_the_block(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 4 * MIB
    other = fork(place, "other", "overlay")
    with monkeypatch.context() as patch:
        patch.setattr(fork_module, "WORK", "no/such")
        with pytest.raises(BtrfsUblkError, match="cannot mount fork 'overlay'"):
            fork(place, "overlay", "overlay", limit)
    # Of a fork that fails, only enabled quotas stay.
    for directory in ("forks", "overlays"):
        assert os.listdir(place.target / directory) == ["other"]
    fsid = filesystem_uuid(place.target)
    qgroups = Path(f"/sys/fs/btrfs/{fsid}/qgroups/mode").read_text()
    assert qgroups.strip() == "squota"
    made = {mode: fork(place, mode, mode, limit) for mode in FORK_MODES}
    before = fetched_bytes(place)
    (other / "more").write_bytes(os.urandom(2 * limit))
    for one in made.values():
        with pytest.raises(OSError) as caught, open(one / "new", "wb", 0) as file:
            for _ in range(2 * limit // (4 * KIB)):
                os.write(file.fileno(), os.urandom(4 * KIB))
                os.fsync(file.fileno())
        assert caught.value.errno == errno.EDQUOT
    commit_transaction(place.target)
    forks = {x.name: x for x in forks_of_image(NAME, base=place.base)}
    assert (forks["other"].used_bytes or 0) >= 2 * limit
    assert forks["other"].quota_bytes is None
    assert fetched_bytes(place) == before
    for mode, one in made.items():
        used = forks[mode].used_bytes
        assert used is not None and limit - 256 * KIB < used <= limit
        assert forks[mode].quota_bytes == limit
        (one / "new").unlink()
    commit_transaction(place.target)
    for one in made.values():
        (one / "new").write_bytes(os.urandom(MIB))
    down_volume(NAME, base=place.base)
    up(place)
    for source in (*FORK_MODES, "other"):
        fork_image(NAME, f"{source}-2", source=source, base=place.base)
    quotas = {x.name: x.quota_bytes for x in forks_of_image(NAME, base=place.base)}
    limited = [name for mode in FORK_MODES for name in (mode, f"{mode}-2")]
    assert quotas == {"other": None, "other-2": None} | dict.fromkeys(limited, limit)


def test_where_there_are_no_simple_quotas(place: Place) -> None:
    with pytest.raises(UsageError, match="quota of 4K is too small"):
        fork(place, "one", "snapshot", 4 * KIB)
    subprocess.run(["btrfs", "quota", "enable", place.target], check=True, timeout=60)
    with pytest.raises(CapabilityError, match="has quotas of the other kind"):
        fork(place, "one", "snapshot", 4 * MIB)
    assert not (place.target / "forks").exists()


def test_an_image_that_brings_our_directories_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No formatter makes such an image, so another name stands for these."""
    volume = volume_directory(NAME, place.base)
    image = volume.definition().image
    down_volume(NAME, base=place.base)
    monkeypatch.setattr("btrfs_ublk.volume.image.OUR_DIRECTORIES", ("rootfs",))
    up(place)  # it was looked at when the volume was made
    down_volume(NAME, base=place.base)
    remove_volume(NAME, base=place.base)
    with pytest.raises(BtrfsUblkError, match="the image has 'rootfs' at its top"):
        up(place, image)
    assert not os.path.lexists(volume.path)


def drop(place: Place) -> None:
    """Come up with nothing in the page cache."""
    down_volume(NAME, base=place.base)
    up(place)


def test_the_image_may_go(place: Place) -> None:
    one, two = fork(place, "one", "overlay"), fork(place, "two", "snapshot")
    (one / "etc/motd").write_text("changed\n")
    totals: list[int] = []
    counts: list[int] = []
    done = detach_image(
        NAME, base=place.base, expect=totals.append, progress=counts.append
    )
    assert done.mount == place.target and done.copied_bytes >= len(BIG)
    assert totals == [fetched_bytes(place)] and sum(counts) <= done.copied_bytes
    again = place.command("detach", NAME, noun="image")
    assert again.returncode == 0 and "was detached" in again.stderr
    shutil.rmtree(place.root / "layout")
    shutil.rmtree(place.base / NAME / "cache")
    drop(place)
    for fork_ in (one, two):
        assert (fork_ / "big").read_bytes() == BIG
    assert (one / "etc/motd").read_text() == "changed\n"
    assert (two / "etc/motd").read_text() == "hello\n"


def test_it_goes_on_after_an_error(place: Place) -> None:
    (data,) = (
        path
        for path in (place.root / "layout/blobs/sha256").iterdir()
        if path.stat().st_size >= len(BIG)
    )
    good, times = data.read_bytes(), data.stat()
    data.chmod(0o600)

    def rot(content: bytes) -> None:
        """Change what is on the disk, as a disk does: a file that somebody writes to
        is another one, and is refused."""
        data.write_bytes(content)
        os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))

    rot(good[: 5 * MIB] + bytes(MIB) + good[6 * MIB :])
    with pytest.raises(BtrfsUblkError, match="is not detached: .*Input/output error"):
        detach_image(NAME, base=place.base)
    (place.target / "still-writable").write_text("yes")
    rot(good)
    drop(place)
    assert detach_image(NAME, base=place.base).copied_bytes > 0
    commit_transaction(place.target)
    assert (place.target / "rootfs/big").read_bytes() == BIG


def test_there_must_be_room(place: Place) -> None:
    with open(place.target / "filler", "wb") as file:
        with pytest.raises(OSError, match="No space left"):
            while True:
                file.write(BIG)
    with pytest.raises(UsageError, match="has no room for") as caught:
        detach_image(NAME, base=place.base)
    assert "volume resize" in str(caught.value)
