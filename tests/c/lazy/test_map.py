"""Mappings in memory (csrc/content/map.c), while other threads look them up."""

from pathlib import Path

import pytest
from support.sanitized_build import run_sanitized


@pytest.mark.data
def test_other_threads_see_whole_mappings(sanitized_build: Path) -> None:
    done = run_sanitized(sanitized_build / "csrc/tests/map-race", 50000, 3)
    assert done.stdout == b"50000 mappings, 0 wrong\n"
