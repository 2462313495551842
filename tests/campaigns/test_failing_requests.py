"""Calls that fail during a server's requests: failing_requests.py, in a short form."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from failing_requests import (
    ALLOCATION,
    EVERY_LATER,
    REQUESTS,
    START_FUSE,
    fail,
    numbers,
    scene_of,
)
from support.needs import Need
from support.shells import EngineShell, describe

from btrfs_ublk.base.capabilities import FUSE

pytestmark = pytest.mark.thorough

ZERO = {"kind": "zero", "length": 1 << 20}
#: One of so many allocations fails.
STEPS = dict.fromkeys(REQUESTS, 1)
STEPS |= {"map-look-up": 20, "map-show": 3, "map-verify": 9, "map-verify-ask": 40}
STEPS |= {"prefetch": 9, "prefetch-remote": 9, "read-remote": 2}


@pytest.mark.parametrize("name", STEPS)
def test_no_memory(sanitized_build: Path, tmp_path: Path, name: str) -> None:
    with scene_of(sanitized_build, tmp_path) as scene:
        for kind in (ALLOCATION, EVERY_LATER):
            at = numbers(random.Random(1), STEPS[name])
            result = fail(scene, name, kind, at)
            assert not result["problems"]
            # What is in the cache is read without an allocation.
            assert result["failed"] or name == "read-cached"


@pytest.mark.parametrize("room", [0, 9000])
def test_no_memory_for_a_line(sanitized_build: Path, room: int) -> None:
    """The connection was dropped, and if it was the owner's, the server ended."""
    with EngineShell(sanitized_build, describe(ZERO)) as shell:
        for number in (1, 2, 3):
            shell.fail("allocation", number)
            answer = shell.map_request("stats", room=" " * room)
            assert shell.failed() == 1
            assert "error" in answer or "reply" in answer
            assert shell.map_request("info", room=" " * room)["reply"] == "info"


def _fail(build: Path, path: Path, name: str, kind: str, at: Iterator[int]) -> None:
    with scene_of(build, path) as scene:
        result = fail(scene, name, kind, at)
    assert not result["problems"]
    assert result["failed"]


@pytest.mark.parametrize(
    ("name", "kind", "step"),
    [
        ("start", ALLOCATION, 500),
        ("start", EVERY_LATER, 500),
        ("start", "pread", 2),
        ("start", "open", 1),
        ("fetch", ALLOCATION, 9000),
        ("fetch", "open", 2),
        ("fetch-look-up", ALLOCATION, 9000),
    ],
)
def test_calls_that_fail_from_the_start(
    sanitized_build: Path, tmp_path: Path, name: str, kind: str, step: int
) -> None:
    """What has to be read may come late, and an end has a message."""
    at = numbers(random.Random(1), step)
    _fail(sanitized_build, tmp_path, name, kind, at)


@pytest.mark.device
@pytest.mark.parametrize(
    ("kind", "step"),
    [("eventfd", 1), ("open", 2), ("mmap", 1), (ALLOCATION, 500), (EVERY_LATER, 500)],
)
def test_calls_of_a_server_with_a_file(
    sanitized_build: Path, tmp_path: Path, need: Need, kind: str, step: int
) -> None:
    """It could end without a message."""
    need(FUSE)
    at = numbers(random.Random(1), step)
    _fail(sanitized_build, tmp_path, START_FUSE, kind, at)


@pytest.mark.device
def test_no_memory_to_say_that_it_serves(
    sanitized_build: Path, tmp_path: Path, need: Need
) -> None:
    """It served all the same, without a word."""
    need(FUSE)
    with scene_of(sanitized_build, tmp_path) as scene:
        fail(scene, START_FUSE, EVERY_LATER, iter([10**7]))
        last = scene.failing.calls
        at = iter(range(last - 40, last, 3))
        result = fail(scene, START_FUSE, EVERY_LATER, at)
        assert not result["problems"]
        assert result["failed"] > 10
