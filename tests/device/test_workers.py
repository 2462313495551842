"""What workers with hidden devices refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import workers
from support.paths import PROJECT

#: Four that a worker has to refuse, and one that it has not.
TESTS = """
import subprocess
import pytest

def test_opens():
    open("/dev/loop-control")

def test_opens_in_a_child():
    subprocess.run(["losetup", "--find", "--show", __file__], check=True)

def test_mounts(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
@pytest.mark.device
def test_is_marked():
    pass

def test_needs_nothing(tmp_path):
    open("/dev/null", "w").write("x")
    open("/dev/urandom", "rb").read(1)
    assert tmp_path.is_relative_to("{basetemp}")
"""


@pytest.mark.thorough
def test_a_worker_makes_no_devices(tmp_path: Path) -> None:
    basetemp = tmp_path / "chosen"
    file = tmp_path / "test_them.py"
    file.write_text(TESTS.replace("{basetemp}", str(basetemp)))
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "conftest",
        "--hide-devices",
    ]
    argv += ["-c", str(PROJECT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*argv, "-n", "1", "--basetemp", str(basetemp), str(file)],
        env={**os.environ, "PYTHONPATH": str(PROJECT / "tests"), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    said = done.stdout
    assert "test_them.py::test_opens - PermissionError" in said
    assert "test_them.py::test_opens_in_a_child" in said
    assert "test_them.py::test_mounts - AssertionError: it left mounts" in said
    assert "test_them.py::test_is_marked - Failed: this test is marked" in said
    assert "2 failed, 2 passed, 2 errors" in said
    assert workers.NOTE.split(". ")[0] in said
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
