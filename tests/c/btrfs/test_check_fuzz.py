"""Damaged and arbitrary images: inspect and check say what is wrong, or that nothing
is, within bounded time, and never crash.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.images import Editor
from support.sanitized_build import SANITIZER_ENVIRONMENT, run_sanitized
from support.seeds import GIB, KIB, MIB, mkseed

ENVIRONMENT = {
    # More memory than this at once would be for what an image claims, not for what is
    # in it.
    "ASAN_OPTIONS": SANITIZER_ENVIRONMENT["ASAN_OPTIONS"]
    + ":max_allocation_size_mb=256"
}


@pytest.fixture(scope="module")
def seed(test_root: Path) -> Iterator[Path]:
    path = test_root / "fuzz-seed.img"
    mkseed("--virtual-data-size=20G", "--chunk-size=4G", "--metadata-only", path)
    yield path
    path.unlink()


def look(build: Path, image: Path) -> list[int]:
    """The exit statuses of inspect and check."""
    statuses = []
    for command in ("inspect", "check"):
        program = build / "csrc/tools/btrfs-ublk-checkseed"
        done = run_sanitized(
            *(program, command, image), statuses=(0, 1), environment=ENVIRONMENT
        )
        if done.returncode and command == "inspect":
            assert b"btrfs-ublk-checkseed: error: " in done.stderr
        statuses.append(done.returncode)
    # What is clean can be inspected.
    assert statuses != [1, 0]
    return statuses


def copy(seed: Path, to: Path) -> Path:
    """With its holes: image files are sparse."""
    with seed.open("rb") as source, to.open("wb") as target:
        end = os.fstat(source.fileno()).st_size
        os.truncate(target.fileno(), end)
        for start, length in ((64 * KIB, 4 * KIB), (64 * MIB, 4 * KIB), (MIB, 5 * MIB)):
            target.seek(start)
            target.write(os.pread(source.fileno(), length, start))
        target.seek(256 * GIB)
        target.write(os.pread(source.fileno(), 4 * KIB, 256 * GIB))
    return to


def test_a_copy_is_still_clean(
    seed: Path, sparse_path: Path, sanitized_build: Path
) -> None:
    assert look(sanitized_build, copy(seed, sparse_path / "image")) == [0, 0]


@pytest.mark.parametrize(
    "size",
    [
        *(0, 64 * KIB + 4095, MIB + 16 * KIB),
        *(5 * MIB + 5000, 64 * MIB + 100, 256 * GIB + 4095),
    ],
)
def test_truncated_images(
    seed: Path, sparse_path: Path, sanitized_build: Path, size: int
) -> None:
    image = copy(seed, sparse_path / "image")
    os.truncate(image, size)
    inspected, checked = look(sanitized_build, image)
    assert checked == 1
    # Without a copy of the superblock it can still be inspected.
    assert inspected == (0 if size >= 6 * MIB else 1)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_flipped_bits(
    seed: Path,
    tmp_path_factory: pytest.TempPathFactory,
    sanitized_build: Path,
    data: st.DataObject,
) -> None:
    """Without a new checksum, each one in what is stored is found."""
    image = copy(seed, tmp_path_factory.mktemp("flip") / "image")
    with Editor(image) as editor:
        blocks = sorted(editor.roots.values())
        start, length = data.draw(
            st.sampled_from(
                [(64 * KIB, 4 * KIB), (64 * MIB, 4 * KIB)]
                + [(bytenr, 16 * KIB) for bytenr in blocks]
            )
        )
        # Of the checksum's field, crc32c uses the first four bytes.
        at = start + data.draw(
            st.one_of(st.integers(0, 3), st.integers(32, length - 1))
        )
        byte = editor.read(at, 1)
        byte[0] ^= 1 << data.draw(st.integers(0, 7))
        editor.write(at, byte)
    assert look(sanitized_build, image)[1] == 1
    shutil.rmtree(image.parent)


@pytest.mark.parametrize(
    ("size", "options", "iterations"),
    [
        ("20G", [], 500),
        ("20G", ["--metadata-profile=dup"], 500),
        ("4T", [], 150),  # trees of two levels
    ],
)
def test_many_changes_in_one_process(
    sparse_path: Path,
    sanitized_build: Path,
    size: str,
    options: list[str],
    iterations: int,
) -> None:
    image = sparse_path / "seed.img"
    mkseed(
        *(f"--virtual-data-size={size}", "--chunk-size=4G", "--metadata-only"),
        *(*options, image),
    )
    run_fuzzer(sanitized_build, iterations, image)


def run_fuzzer(build: Path, iterations: int, image: Path) -> None:
    words = ("--iterations", iterations, image)
    run_sanitized(build / "csrc/tests/fuzz-reader", *words, environment=ENVIRONMENT)
