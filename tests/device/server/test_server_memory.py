"""What a server takes of memory: little at rest, more for a while when it is needed,
and none to go on serving when there is none to be had.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.cgroups import MEMORY_GROUPS, MemoryGroup, memory_group
from support.needs import Need
from support.waiting import wait_until

from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.server import (
    BlockServer,
    Description,
    FileSegment,
    LazySegment,
    MemsetSegment,
    Segment,
)
from btrfs_ublk.units import KIB, MIB

pytestmark = pytest.mark.fuse

SIZE_BYTES = 64 * MIB
#: The largest request of the front end, and how many are read at once.
REQUEST_BYTES = MIB
READERS = 24
#: 4.0 MiB when this was written, 2 of them buffers of two threads; and 3.1, with 0.5.
AT_REST_BYTES = {"memset": 6 * MIB, "lazy": 5 * MIB}


def memory_bytes(server: BlockServer, field: str) -> int:
    rollup = Path(f"/proc/{server.pid}/smaps_rollup").read_text()
    found = [line for line in rollup.splitlines() if line.startswith(f"{field}:")]
    return int(found[0].split()[1]) * KIB


@pytest.fixture
def disk_description() -> Iterator[Description]:
    """What answers late: a device of another server. Its bytes say where they are."""
    segments = [
        MemsetSegment(offset=at, length=REQUEST_BYTES, byte=at // REQUEST_BYTES + 1)
        for at in range(0, SIZE_BYTES, REQUEST_BYTES)
    ]
    with BlockServer(Description(SIZE_BYTES, segments), front_end="fuse") as disk:
        segment = FileSegment(
            offset=0, length=SIZE_BYTES, path=str(disk.device), direct=True
        )
        yield Description(SIZE_BYTES, [segment])


def read_everything(server: BlockServer) -> None:
    """With many requests at a time, each as large as the front end has them."""

    def is_right(number: int) -> bool:
        read = read_direct(server.device, number * REQUEST_BYTES, REQUEST_BYTES)
        return read == bytes([number + 1]) * REQUEST_BYTES

    with ThreadPoolExecutor(READERS) as pool:
        assert all(pool.map(is_right, range(SIZE_BYTES // REQUEST_BYTES)))


def refuse_instead_of_killing(server: BlockServer, group: MemoryGroup) -> None:
    """When the group has no memory left. A page fault of the server waits for ever."""
    oom_control = group.path / "memory.oom_control"  # of version 1
    if oom_control.exists():
        oom_control.write_text("1")
        return
    try:
        Path(f"/proc/{server.pid}/oom_score_adj").write_text("-1000")
    except PermissionError:
        pytest.skip("without CAP_SYS_RESOURCE, the OOM killer takes the server")


@pytest.mark.parametrize("kind", ["memset", "lazy"])
def test_a_server_at_rest_takes_little(kind: str, sparse_path: Path) -> None:
    segment: Segment = MemsetSegment(offset=0, length=SIZE_BYTES, byte=1)
    if kind == "lazy":
        segment = LazySegment(offset=0, length=SIZE_BYTES, map=str(sparse_path / "map"))
    description = Description(SIZE_BYTES, [segment])
    with BlockServer(description, front_end="fuse", queues=2) as server:
        assert memory_bytes(server, "Private_Dirty") < AT_REST_BYTES[kind]


def test_a_server_that_gets_no_more_memory_goes_on(
    disk_description: Description, need: Need
) -> None:
    """Nothing that a control group has to grant is needed to answer large reads."""
    need(MEMORY_GROUPS)
    with memory_group() as group:
        with BlockServer(disk_description, front_end="fuse", queues=2) as server:
            read_everything(server)  # io_uring makes its requests as they are needed
            wait_until(lambda: memory_bytes(server, "Pss_Shmem") < 3 * MIB)
            before = memory_bytes(server, "Pss_Shmem")
            refuse_instead_of_killing(server, group)
            group.limit(64 * KIB)
            group.members.write_text(str(server.pid))
            for _ in range(3):
                read_everything(server)
            assert memory_bytes(server, "Pss_Shmem") <= before
            group.limit(64 * MIB)
            wait_until(lambda: _grows(server, before))


def _grows(server: BlockServer, before_bytes: int) -> bool:
    read_everything(server)
    return memory_bytes(server, "Pss_Shmem") > before_bytes
