"""``btrfs-ublk image detach``: all data are local then, and the image may go."""

from __future__ import annotations

import os
import shutil

import pytest
from support.volumes import BIG, NAME, Place, fetched_bytes, fork, up

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.btrfs import commit_transaction
from btrfs_ublk.units import MIB
from btrfs_ublk.volume import detach_image, down_volume

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("in_process")]


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
