"""Mappings in memory (csrc/lazy/map.c), while other threads look them up."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.sanitized_build import SANITIZER_ENVIRONMENT


@pytest.mark.data
def test_other_threads_see_whole_mappings(sanitized_build: Path) -> None:
    done = subprocess.run(
        [sanitized_build / "csrc/tests/map-race", "50000", "3"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    assert done.stdout == "50000 mappings, 0 wrong\n", done.stderr
