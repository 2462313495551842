"""Which CPUs serve: chosen on machines of any shape, and as the kernel sees it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.needs import Serve, inapplicable

from btrfs_ublk.errors import UsageError
from btrfs_ublk.server import BlockServer, Description, FrontEndName, ZeroSegment
from btrfs_ublk.units import KIB, MIB

ZEROES = Description(MIB, [ZeroSegment(offset=0, length=MIB)])


def expand(text: str) -> list[int]:
    """ "0-3,8" """
    cpus: list[int] = []
    for word in text.split(","):
        first, _, last = word.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


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


@pytest.mark.fuse
def test_cpus_that_are_not_there_are_the_caller_s_mistake() -> None:
    with pytest.raises(UsageError, match="this process may use only CPUs"):
        with BlockServer(ZEROES, cpus=[1023], front_end="fuse"):
            pass
