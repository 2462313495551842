"""Which CPUs serve: chosen on machines of any shape, and as the kernel sees it."""

from __future__ import annotations

import subprocess

import pytest

from btrfs_ublk.base.helpers import SERVER, helper_path

TIMEOUT_S = 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a list of CPUs such as 0-3,8"),
        ("x", "not a list of CPUs"),
        ("1-", "not a list of CPUs"),
        ("3-1", "not a list of CPUs"),
        ("0,,1", "not a list of CPUs"),
        ("-1", "not a list of CPUs"),
        ("0 1", "not a list of CPUs"),
        ("5000", "a number is too large"),
        ("1023", "may use only CPUs"),
    ],
)
def test_cpus_that_make_no_sense_are_wrong_usage(text: str, message: str) -> None:
    done = subprocess.run(
        [helper_path(SERVER), "--cpus", text, "/dev/null"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 2 and message in done.stderr
