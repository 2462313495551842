"""Which CPUs serve: chosen on machines of any shape, and as the kernel sees it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import Serve, inapplicable
from sanitized_build import SANITIZER_ENVIRONMENT

from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.errors import UsageError
from btrfs_ublk.server import BlockServer, Description, FrontEndName, ZeroSegment
from btrfs_ublk.units import KIB, MIB

ZEROES = Description(MIB, [ZeroSegment(offset=0, length=MIB)])
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


def test_nodes_are_in_order_of_their_numbers(
    sanitized_build: Path, tmp_path: Path
) -> None:
    for number in range(12):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(f"{number}\n")
    done = subprocess.run(
        [str(sanitized_build / "csrc/tests/placement-shell"), str(tmp_path)]
        + ["0-11", *["any"] * 12],
        capture_output=True,
        check=True,
        timeout=TIMEOUT_S,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    assert json.loads(done.stdout) == [[number] for number in range(12)]


def threads_of(server: BlockServer) -> list[list[int]]:
    """The CPUs that the kernel lets each serving thread run on."""
    found = []
    for task in sorted(Path(f"/proc/{server.pid}/task").iterdir(), key=_number):
        # Neither the first, nor the kernel's own (iou-wrk-PID) for control commands.
        if _number(task) == server.pid or "iou-" in (task / "comm").read_text():
            continue
        lines = (task / "status").read_text().splitlines()
        (cpus,) = (x.split()[1] for x in lines if x.startswith("Cpus_allowed_list:"))
        found.append(expand(cpus))
    # With fuse, the last one gets memory for the others.
    assert all(cpus in server.placement for cpus in found[len(server.placement) :])
    return found[: len(server.placement)]


def _number(path: Path) -> int:
    return int(path.name)


def test_threads_are_where_the_server_says(serve: Serve) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    with serve(ZEROES, queues=len(cpus)) as server:
        assert len(server.placement) == len(cpus)
        assert threads_of(server) == server.placement
        assert set().union(*server.placement) <= set(cpus)
        if server.front_end == "ublk":
            # As many queues as CPUs: each has its own.
            assert sorted(server.placement) == [[cpu] for cpu in cpus]
        again = server.placement
    with serve(ZEROES, queues=len(cpus)) as server:
        assert server.placement == again


def test_threads_keep_to_the_cpus_that_were_given(serve: Serve) -> None:
    for cpu in sorted(os.sched_getaffinity(0)):
        with serve(ZEROES, queues=2, cpus=[cpu]) as server:
            assert server.placement == [[cpu]] * len(server.placement)
            assert threads_of(server) == server.placement


def test_buffers_are_on_the_node_of_their_thread(
    serve: Serve, front_end: FrontEndName
) -> None:
    """All pages that are there at rest are touched by the thread itself, once it is
    where it stays.
    """
    buffers = 1 if front_end == "fuse" else 64
    nodes = {
        int(path.name.removeprefix("node")): set(expand(text.strip()))
        for path in Path("/sys/devices/system/node").glob("node[0-9]*")
        if (text := (path / "cpulist").read_text()).strip()
    }
    if not nodes:
        inapplicable("this kernel tells of no NUMA nodes (CONFIG_NUMA)")
    with serve(ZEROES, queues=2, depth=64, max_io_bytes=256 << 10) as server:
        expected: dict[int, int] = {}
        for cpus in server.placement:
            (node,) = (n for n, of_node in nodes.items() if set(cpus) <= of_node)
            expected[node] = expected.get(node, 0) + buffers * 256 * KIB
        pages: dict[int, int] = {}
        for line in Path(f"/proc/{server.pid}/numa_maps").read_text().splitlines():
            words = line.split()
            # Those of fuse are in a memfd, which outlives the server.
            files = [word for word in words if word.startswith("file=")]
            if files and not files[0].startswith("file=/memfd:"):
                continue
            for word in words:
                name, _, count = word.partition("=")
                if name[:1] == "N" and name[1:].isdigit():
                    node = int(name[1:])
                    pages[node] = pages.get(node, 0) + int(count)
    for node, least in expected.items():
        assert pages[node] * os.sysconf("SC_PAGE_SIZE") >= least
    # What is elsewhere is small: the heap and stacks of a process.
    elsewhere = sum(count for node, count in pages.items() if node not in expected)
    assert elsewhere * os.sysconf("SC_PAGE_SIZE") < 4 * MIB


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


@pytest.mark.native
@pytest.mark.fuse
def test_cpus_that_are_not_there_are_the_caller_s_mistake() -> None:
    with pytest.raises(UsageError, match="this process may use only CPUs"):
        with BlockServer(ZEROES, cpus=[1023], front_end="fuse"):
            pass
