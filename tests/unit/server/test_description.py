"""Descriptions: what is refused, and that nothing is lost on the way through JSON."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from btrfs_ublk.errors import UsageError
from btrfs_ublk.server import (
    Description,
    ErrorSegment,
    FileSegment,
    LazySegment,
    MemsetSegment,
    PatternSegment,
    Segment,
    ZeroSegment,
)
from btrfs_ublk.server.description import MAX_DEVICE_BYTES

BLOCK = 4096

#: The example of docs/design/protocol.md.
EXAMPLE = """
{"version": 1, "size": 1099511627776, "read_only": true, "segments": [
  {"kind": "file", "offset": 0, "length": 8388608, "path": "a", "file_offset": 0},
  {"kind": "zero", "offset": 8388608, "length": 549747425280},
  {"kind": "memset", "offset": 549755813888, "length": 549755813888, "byte": 97}]}
"""


def segment_at(offset: int, length: int) -> st.SearchStrategy[Segment]:
    place = {"offset": st.just(offset), "length": st.just(length)}
    blocks = st.integers(0, 1 << 40).map(lambda number: number * BLOCK)
    return st.one_of(
        st.builds(ZeroSegment, **place),
        st.builds(ErrorSegment, **place),
        st.builds(MemsetSegment, **place, byte=st.integers(0, 255)),
        st.builds(PatternSegment, **place, base=st.integers(-(1 << 63), (1 << 63) - 1)),
        st.builds(
            FileSegment,
            **place,
            path=st.text(min_size=1),
            file_offset=blocks,
            direct=st.booleans(),
        ),
        st.builds(
            LazySegment,
            **place,
            map=st.text(min_size=1),
            cache=st.none() | st.text(min_size=1),
            map_offset=blocks,
            unmapped=st.sampled_from(["error", "zero"]),
            deadline_s=st.none() | st.integers(1, 1000) | st.floats(0.5, 1000),
        ),
    )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[Segment]]:
    """A size, and segments in it with gaps between them."""
    position, segments = 0, []
    for gap, length in draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 1 << 30)), max_size=8)
    ):
        position += gap * BLOCK
        segments.append(draw(segment_at(position, length * BLOCK)))
        position += length * BLOCK
    return position + draw(st.integers(1, 9)) * BLOCK, segments


@settings(max_examples=20)
@given(layouts())
def test_json_and_back(layout: tuple[int, list[Segment]]) -> None:
    size, segments = layout
    description = Description.filled(size, segments)
    assert Description.from_json(description.to_json()) == description


@settings(max_examples=20)
@given(layouts(), st.sampled_from(["error", "zero"]), st.randoms())
def test_gaps_are_filled_and_nothing_else(
    layout: tuple[int, list[Segment]], gaps: Any, random: Any
) -> None:
    size, segments = layout
    shuffled = random.sample(segments, len(segments))
    filled = Description.filled(size, shuffled, gaps=gaps).segments
    assert [segment for segment in filled if segment in segments] == segments
    assert sum(segment.length for segment in filled) == size
    extra = {segment.kind for segment in filled if segment not in segments}
    assert extra <= {gaps}


def changed(**changes: Any) -> str:
    """The example, with keys of the first segment (or _keys of the whole) changed."""
    keys = json.loads(EXAMPLE)
    for key, value in changes.items():
        place = keys if key.startswith("_") else keys["segments"][0]
        if value is None:
            place.pop(key.removeprefix("_"), None)
        else:
            place[key.removeprefix("_")] = value
    return json.dumps(keys)


def lazy(**changes: Any) -> str:
    """The example with a lazy segment instead of the first."""
    keys: dict[str, Any] = {"kind": "lazy", "path": None, "file_offset": None}
    return changed(**keys | {"map": "map"} | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "no JSON object"),
        (changed(_version=2), "version 2"),
        (changed(_version=None), "version is missing"),
        (changed(_size="1"), "size is '1', not an integer"),
        (
            changed(_size=4095),
            "size 4095 is not .*\n  hint: the nearest are 0 and 4096",
        ),
        (changed(_size=0), "size 0 is not within"),
        (changed(_size=1 << 63), "is not within"),
        (changed(_size=(1 << 40) + BLOCK), "segments end at 1099511627776"),
        (changed(_read_only=1), "read_only is 1, neither true nor false"),
        (changed(_segments=[]), "segments end at 0"),
        (changed(kind="tape"), "segment kind 'tape' is unknown"),
        (changed(kind=["zero"]), "is unknown"),
        (changed(offset=BLOCK), "begins at 4096, .* ends at 0: they leave a hole"),
        (changed(length=2 * 8388608), "they overlap"),
        (changed(length=0), "length is 0"),
        (changed(length=100), "length 100 is not a multiple"),
        (changed(length=-BLOCK), "length -4096 is negative"),
        (changed(path=None), "path is missing"),
        (changed(file_offset=1), "file_offset 1 is not a multiple"),
        (changed(writable=True), "is writable, the device is read-only"),
        (changed(byte=3), "key 'byte' is unknown"),
        (
            changed(kind="memset", path=None, file_offset=None, byte=256),
            "byte is 256, not 0 to 255",
        ),
        (
            changed(kind="pattern", path=None, file_offset=None, base=1 << 63),
            "needs more than 64 bits",
        ),
        (lazy(map_offset=1), "map_offset 1 is not a multiple"),
        (lazy(map_offset=MAX_DEVICE_BYTES // BLOCK * BLOCK), "is too large"),
        (lazy(deadline_s=0), "deadline_s is 0"),
    ],
)
def test_wrong_descriptions_are_explained(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Description.from_json(text)


def test_overlapping_segments_are_not_filled_up() -> None:
    one = ZeroSegment(offset=0, length=2 * BLOCK)
    with pytest.raises(UsageError, match="begins before 8192"):
        Description.filled(
            4 * BLOCK, [ErrorSegment(offset=BLOCK, length=2 * BLOCK), one]
        )
    with pytest.raises(UsageError, match="ends after 4096"):
        Description.filled(BLOCK, [one])


PAIR = [ZeroSegment(offset=0, length=BLOCK), ErrorSegment(offset=BLOCK, length=BLOCK)]


def pair_and(*segments: Segment, read_only: bool = True) -> Description:
    every = [*PAIR, *segments]
    return Description(every[-1].end, every, read_only)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Description(BLOCK, [PAIR[0]]), "has 8192 bytes, .* 4096: .* never shrinks"),
        (
            Description(2 * BLOCK, [PAIR[0], ZeroSegment(offset=BLOCK, length=BLOCK)]),
            "segment 1 was",
        ),
        (
            Description(4 * BLOCK, [ZeroSegment(offset=0, length=4 * BLOCK)]),
            "segment 0",
        ),
        (pair_and(read_only=False), "is read-only, the new description is not"),
        (
            Description(
                3 * BLOCK,
                [PAIR[0], FileSegment(offset=BLOCK, length=2 * BLOCK, path="a")],
            ),
            "segment 1 was .*error",
        ),
    ],
)
def test_a_device_becomes_nothing_else(other: Description, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pair_and().check_growth(other)


@settings(max_examples=40)
@given(
    base=st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-20000, 0),
    offset=st.integers(0, MAX_DEVICE_BYTES - 20000) | st.integers(0, 20000),
    length=st.integers(0, 10000),
)
def test_what_a_pattern_holds(base: int, offset: int, length: int) -> None:
    segment = PatternSegment(offset=0, length=MAX_DEVICE_BYTES, base=base)
    first = offset // 8 * 8
    words = [(base + at) % (1 << 64) for at in range(first, offset + length, 8)]
    expected = b"".join(word.to_bytes(8, "little") for word in words)
    assert segment.content(offset, length) == expected[offset - first :][:length]
