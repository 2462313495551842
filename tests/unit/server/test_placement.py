"""Which CPUs serve: chosen on machines of any shape, and as the kernel sees it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.sanitized_build import SANITIZER_ENVIRONMENT

from btrfs_ublk.base.helpers import SERVER, helper_path

TIMEOUT_S = 30


def expand(text: str) -> list[int]:
    """ "0-3,8" """
    cpus: list[int] = []
    for word in text.split(","):
        first, _, last = word.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


@pytest.mark.parametrize(
    ("nodes", "allowed", "submitters", "chosen"),
    [
        # One node, or none that the kernel tells of: what is allowed.
        ([], "0-3", ["any", "any"], ["0-3", "0-3"]),
        (["0-3"], "0-3", ["0-1", "2-3"], ["0-1", "2-3"]),
        (["0-3"], "1", ["0-1", "2-3"], ["1", "1"]),
        # Where anybody submits, the nodes take turns.
        (["0-3", "4-7"], "0-7", ["any"] * 3, ["0-3", "4-7", "0-3"]),
        (["0-3", "4-7"], "5", ["any"] * 2, ["5", "5"]),
        # A queue of many CPUs keeps to the node that has most of them.
        (["0-3", "4-7"], "0-7", ["0-7", "2-6", "3,4"], ["0-3", "4-6", "3"]),
        (["0-3,8-11", "4-7,12-15"], "0-15", ["2-5,12"], ["4-5,12"]),
        # Only CPUs that are not allowed submit: the turn goes on.
        (["0-3", "4-7"], "4-7", ["0-3", "4-5"], ["4-7", "4-5"]),
        # A node of memory only, and one that is not there.
        (["0-1", "", "2-3"], "0-3", ["any"] * 2, ["0-1", "2-3"]),
        # They are in the order of their numbers.
        ([*map(str, range(12))], "0-11", ["any"] * 12, [*map(str, range(12))]),
    ],
)
def test_threads_stay_on_a_node(
    sanitized_build: Path,
    tmp_path: Path,
    nodes: list[str],
    allowed: str,
    submitters: list[str],
    chosen: list[str],
) -> None:
    for number, cpus in enumerate(nodes):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(cpus + "\n")
    (tmp_path / "node").mkdir()
    (tmp_path / "nodes-online").write_text("0\n")
    done = subprocess.run(
        [str(sanitized_build / "csrc/tests/placement-shell"), str(tmp_path)]
        + [allowed, *submitters],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    assert json.loads(done.stdout) == [expand(text) for text in chosen]


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
