"""Calls of helpers that fail: failing_calls.py, in a short form."""

import subprocess
from pathlib import Path

import pytest
from failing_calls import STRACE
from support.needs import Need
from support.paths import PROJECT

pytestmark = pytest.mark.thorough

#: One of so many calls fails: more where there are few.
STEPS = {"seed": 3, "codec": 3, "mkimage": 20, "mkseed": 3, "readimage-list": 12}


@pytest.mark.parametrize("helper", STEPS)
def test_calls_that_fail(
    sanitized_build: Path, sparse_path: Path, need: Need, helper: str
) -> None:
    need(STRACE)
    library = sanitized_build / "csrc/tests/fail-malloc.so"
    words = ["failing-calls", "--helper", helper, "--library", library]
    words += ["--step", str(STEPS[helper])]
    kinds = ["--kind=allocation", "--kind=pread64", "--kind=openat"]
    done = subprocess.run(
        [PROJECT / "scripts/torture", *words, *kinds, "--parent", sparse_path],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert " 0 failures" in done.stderr
