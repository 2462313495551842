"""Mappings in memory (csrc/lazy/map.c), against a model that is slow and plain."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.sanitized_build import SANITIZER_ENVIRONMENT

pytestmark = pytest.mark.data

BLOCK = 4096
SOURCES = 16
TIMEOUT_S = 60
#: A few blocks, so that mappings meet; and the end of what 64 bits can name.
BLOCKS = st.integers(0, 60) | st.integers(2**52 - 20, 2**52 - 10)
LENGTHS = st.integers(1, 9)


@dataclass(frozen=True, order=True)
class Mapping:
    offset: int
    length: int
    source: int
    source_offset: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    def __str__(self) -> str:
        return f"{self.offset} {self.length} {self.source} {self.source_offset}"


class Model:
    """What map.h promises."""

    def __init__(self) -> None:
        self.mappings: list[Mapping] = []

    def answer(self, command: str) -> list[str]:
        name, *words = command.split()
        numbers = [int(word) for word in words]
        return [str(x) for x in getattr(self, name)(*numbers)]

    def add(self, *numbers: int) -> list[object]:
        new = Mapping(*numbers)
        (conflict,) = self.overlap(new.offset, new.length)
        if conflict != "none":
            return [conflict]
        self.mappings = sorted([*self.mappings, new])
        return ["added"]

    def find(self, offset: int) -> list[object]:
        found = [x for x in self.mappings if x.offset <= offset < x.end]
        return [*found[:1], "none"][:1]

    def next(self, offset: int) -> list[object]:
        found = [x for x in self.mappings if x.end > offset]
        return [*found[:1], "none"][:1]

    def overlap(self, offset: int, length: int) -> list[object]:
        found = [
            x for x in self.mappings if x.end > offset and x.offset < offset + length
        ]
        return [*found[:1], "none"][:1]

    def room(self, start: int, end: int, length: int, alignment: int) -> list[object]:
        # The lowest place is the start, or right behind a mapping, rounded up.
        for candidate in [start, *(x.end for x in self.mappings if x.end > start)]:
            offset = -(-candidate // alignment) * alignment
            if offset + length > end:
                break
            if self.overlap(offset, length) == ["none"]:
                return [offset]
        return ["none"]

    def reserve(self, _count: int) -> list[object]:
        return ["reserved"]

    def list(self) -> list[object]:
        return [len(self.mappings), *self.mappings]


def blocks(*numbers: int) -> tuple[int, ...]:
    return tuple(BLOCK * number for number in numbers)


ADDITIONS = st.builds(
    lambda at, length, source, source_at: "add {} {} {} {}".format(
        *blocks(at, length), source, BLOCK * source_at
    ),
    BLOCKS,
    LENGTHS,
    st.integers(0, SOURCES - 1),
    st.integers(0, 2**50),
)
#: Lengths and alignments are few, so that searches meet what others have remembered.
SEARCHES = st.builds(
    lambda start, room, length, alignment: "room {} {} {} {}".format(
        *blocks(start, start + room, length, alignment)
    ),
    st.integers(0, 50),
    st.integers(0, 80),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 4, 8]),
)
LOOKUPS = st.builds(
    lambda name, at, into: f"{name} {BLOCK * at + into}",
    st.sampled_from(["find", "next"]),
    BLOCKS,
    st.sampled_from([0, 1, BLOCK - 1]),
)
OVERLAPS = st.builds(
    lambda at, length: "overlap {} {}".format(*blocks(at, length)), BLOCKS, LENGTHS
)
RESERVES = st.builds(lambda count: f"reserve {count}", st.integers(0, 3000))
COMMANDS = st.lists(
    ADDITIONS | SEARCHES | LOOKUPS | OVERLAPS | RESERVES, min_size=1, max_size=120
)


@given(COMMANDS)
@example(["add 4096 4096 0 0", "room 0 8192 8192 4096", "room 0 65536 8192 4096"])
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_it_does_as_the_model(sanitized_build: Path, commands: list[str]) -> None:
    commands = [*commands, "list"]
    model = Model()
    expected = [line for command in commands for line in model.answer(command)]
    assert run(sanitized_build, stdin="\n".join(commands)).splitlines() == expected


@pytest.mark.parametrize("threads", [0, 3])
def test_other_threads_see_whole_mappings(sanitized_build: Path, threads: int) -> None:
    done = run(sanitized_build, "--race", "50000", str(threads))
    assert done == "50000 mappings, 0 wrong\n"


def test_room_is_found_as_fast_in_a_full_map(sanitized_build: Path) -> None:
    """A search that began at the start each time would look at 800 million mappings."""
    count = 40_000
    commands = []
    for number in range(count):
        commands += [
            f"room 0 {2**60} 8192 8192",
            f"add {8192 * number} 8192 0 0",
            # Of another shape in between, and one that never finds anything.
            f"room 0 {2**60} 12288 4096",
            f"room 0 {8192 * number} 8192 8192",
        ]
    lines = run(sanitized_build, stdin="\n".join(commands)).splitlines()
    assert lines[0::4] == [str(8192 * number) for number in range(count)]
    assert lines[2::4] == [str(8192 * (number + 1)) for number in range(count)]
    assert set(lines[3::4]) == {"none"}


def test_room_is_found_as_fast_for_many_lengths(sanitized_build: Path) -> None:
    """What a search has seen is known for all lengths, not only for its own."""
    lengths = [BLOCK * (1 + number // 8) for number in reversed(range(80_000))]
    commands, offsets = [], [0]
    for length in lengths:
        commands += [f"room 0 {2**60} {length} 4096", f"add {offsets[-1]} {length} 0 0"]
        offsets.append(offsets[-1] + length)
    lines = run(sanitized_build, stdin="\n".join(commands)).splitlines()
    assert lines[0::2] == [str(offset) for offset in offsets[:-1]]


def run(build: Path, *options: str, stdin: str = "") -> str:
    done = subprocess.run(
        [str(build / "csrc/tests/map-shell"), *options],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout
