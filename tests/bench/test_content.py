"""What benchmarks read: pieces of virtual data, and the bytes that they must have."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from btrfs_ublk.base.readers import read_buffered
from btrfs_ublk.bench.config import SOURCES
from btrfs_ublk.bench.content import (
    WrongDataError,
    check,
    check_ranges,
    clone_pieces,
    make_contents,
)
from btrfs_ublk.server import Description
from btrfs_ublk.units import BLOCK_BYTES, EIB, MIB

BLOCKS = st.integers(4, EIB // BLOCK_BYTES)


@given(BLOCKS, BLOCKS)
def test_pieces_are_apart_and_make_up_the_clone(one: int, other: int) -> None:
    clone, virtual = sorted((one * BLOCK_BYTES, other * BLOCK_BYTES))
    pieces = clone_pieces(virtual_data_bytes=virtual, clone_bytes=clone)
    position = virtual_position = 0
    for piece in pieces:
        assert piece.offset == position and piece.virtual_offset >= virtual_position
        assert piece.virtual_offset % BLOCK_BYTES == piece.size_bytes % BLOCK_BYTES == 0
        position += piece.size_bytes
        virtual_position = piece.virtual_offset + piece.size_bytes
    assert (position, virtual_position) == (clone, virtual)
    assert pieces[0].virtual_offset == 0
    assert pieces[0].size_bytes == pieces[2].size_bytes <= clone // 4


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_expected_is_what_is_served(tmp_path: Path, source: str) -> None:
    """The description says what the server answers, the pieces where that is."""
    virtual, clone = 64 * MIB, MIB
    pieces = clone_pieces(virtual_data_bytes=virtual, clone_bytes=clone)
    contents = make_contents(source, virtual_data_bytes=virtual, pieces=pieces)
    description = Description(virtual, [contents.served])
    whole = b"".join(
        description.content(piece.virtual_offset, piece.size_bytes) for piece in pieces
    )
    assert contents.content(0, clone) == whole
    for offset, length in check_ranges(clone):
        wanted = whole[offset : offset + length]
        assert contents.content(offset, length) == wanted
    path = tmp_path / "clone"
    path.write_bytes(whole)
    assert check(path, contents, check_ranges(clone), read_buffered) == 30
    if source != "memset":
        return
    for at in (0, clone // 4, clone - 1):
        path.write_bytes(whole[:at] + b"b" + whole[at + 1 :])
        with pytest.raises(WrongDataError, match=f"byte {at} is 62, not 61"):
            check(path, contents, check_ranges(clone), read_buffered)
