"""More room for what is written: up, down, killed in between, and what is refused."""

import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.volumes import NAME, Place, killed_at

from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE
from btrfs_ublk.device.locks import registry_locked
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel import loop_device
from btrfs_ublk.kernel.btrfs import grow_filesystem
from btrfs_ublk.units import GIB, MIB
from btrfs_ublk.volume import (
    down_volume,
    remove_volume,
    resize_volume,
    show_volume,
    up_volume,
)
from btrfs_ublk.volume.store import volume_directory, volumes_directory

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("in_process")]

#: What is called while a volume that is up grows, in this order: module and function.
STEPS = [
    ("resize", "_extend"),
    ("resize", "_write_intent"),
    ("resize", "_grow_mounted"),
    ("resize", "grow_filesystem"),
    ("store", "VolumeDirectory.write_made"),
]


@pytest.fixture
def place(sparse_path: Path) -> Iterator[Place]:
    found = Place(sparse_path, "fuse")
    with registry_locked(volumes_directory(found.base, make=True)):
        found.content("one")
    yield found
    found.take_all_down()


def size_of(place: Place) -> int:
    """What df shows of the device that takes what is written, less what it has shown
    of the seed.
    """
    return shutil.disk_usage(place.target).total


def fill(path: Path, size_bytes: int) -> None:
    block = os.urandom(MIB)
    with path.open("xb", buffering=0) as file:
        for _ in range(size_bytes // MIB):
            file.write(block)
        os.fsync(file.fileno())


def test_it_grows_under_a_writer(place: Place) -> None:
    """256 MiB do not take 300; a gigabyte does, with no new mount."""
    up_volume(NAME, place.definition("one"), base=place.base)
    before = size_of(place)
    with pytest.raises(OSError, match="No space left"):
        fill(place.target / "too-large", 300 * MIB)
    (place.target / "too-large").unlink()
    stop = threading.Event()
    errors: list[OSError] = []

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                with (place.target / "busy").open("wb", buffering=0) as file:
                    file.write(number.to_bytes(8) * 8192)
                    os.fsync(file.fileno())
            except OSError as error:
                errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        done = place.command("resize", NAME, "1G")
    finally:
        stop.set()
        writer.join()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not errors
    assert size_of(place) == before + GIB - 256 * MIB
    assert place.answer("status", NAME)["writable_bytes"] == GIB
    fill(place.target / "large", 300 * MIB)
    assert place.matches("one")
    down_volume(NAME, base=place.base)
    kept = volume_directory(NAME, place.base).definition()
    assert kept.writable_bytes == GIB
    assert up_volume(NAME, kept, base=place.base).writable_bytes == GIB
    assert size_of(place) == before + GIB - 256 * MIB
    assert (place.target / "large").stat().st_size == 300 * MIB
    # "up" with more does the same.
    more = replace(kept, writable_bytes=GIB + 64 * MIB)
    assert up_volume(NAME, more, base=place.base).writable_bytes == GIB + 64 * MIB
    assert size_of(place) == before + GIB - 192 * MIB


@pytest.mark.parametrize(
    ("is_up", "steps"),
    [
        pytest.param(True, STEPS[::2], marks=pytest.mark.thorough),
        (True, STEPS[1::2]),
        (False, STEPS[1:2]),
    ],
)
def test_killed_in_between(
    place: Place, is_up: bool, steps: list[tuple[str, str]]
) -> None:
    """Whatever the next command is, it completes it or does not mind."""
    definition = place.definition("one")
    for number, (module, function) in enumerate(steps):
        up_volume(NAME, definition, base=place.base)
        before = size_of(place)
        if not is_up:
            down_volume(NAME, base=place.base)
        grow = f"volume.resize_volume('{NAME}', {GIB}, base={place.base!r})"
        killed_at(f"volume.{module}:{function}", grow)
        if number % 2:
            done = place.command("up", NAME)  # as it is kept
            assert done.returncode == 0, (function, done.stderr)
        kept = resize_volume(NAME, GIB, base=place.base)
        if not is_up:
            up_volume(
                NAME, volume_directory(NAME, place.base).definition(), base=place.base
            )
            kept = show_volume(NAME, base=place.base)
        assert (kept.state, kept.writable_bytes) == ("up", GIB), function
        assert size_of(place) == before + GIB - 256 * MIB, function
        assert place.matches("one")
        down_volume(NAME, base=place.base)
        remove_volume(NAME, base=place.base)


def test_what_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, sparse_path: Path
) -> None:
    up_volume(NAME, place.definition("one"), base=place.base)
    before = size_of(place)
    for size, words in (
        ("128M", "cannot shrink to 128M"),
        ("1000001", "multiple of 4096"),
        ("9E", "9E"),
    ):
        done = place.command("resize", NAME, size)
        assert done.returncode == 2 and words in done.stderr, (size, done.stderr)
    config = sparse_path / "config"
    (config / "volumes").mkdir(parents=True)
    (config / "volumes" / f"{NAME}.toml").write_text('writable = "256M"\n')
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))
    with pytest.raises(UsageError, match="is defined in .*toml") as raised:
        resize_volume(NAME, GIB, base=place.base)
    assert raised.value.hint is not None and "volume up" in raised.value.hint
    assert size_of(place) == before
    image = sparse_path / "other.img"
    with image.open("xb") as file:
        file.truncate(64 * MIB)
    with loop_device(image) as other:
        with pytest.raises(BtrfsUblkError, match="is no device of"):
            grow_filesystem(place.target, other.path, GIB)
