"""Calls that fail during a server's requests: failing_requests.py, in a short form."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from failing_calls import ALLOCATION, EVERY_LATER, numbers
from failing_requests import fail, scene_of

#: One of so many allocations fails.
STEPS = {"read-cached": 1}


@pytest.mark.parametrize("name", STEPS)
def test_no_memory(sanitized_build: Path, tmp_path: Path, name: str) -> None:
    with scene_of(sanitized_build, tmp_path) as scene:
        for kind in (ALLOCATION, EVERY_LATER):
            at = numbers(random.Random(1), STEPS[name])
            assert not fail(scene, name, kind, at)["problems"]
