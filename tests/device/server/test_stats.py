"""What servers count and time: histograms, the engine's statistics, whole servers."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.needs import Serve
from support.processes import freeze
from support.shells import BLOCK
from support.waiting import wait_until

from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.server import (
    BlockServer,
    Description,
    ErrorSegment,
    FileSegment,
    MemsetSegment,
    ServerStats,
)
from btrfs_ublk.units import MIB

PERCENTS = (50.0, 90.0, 99.0, 99.9)


TIMEOUT_S = 30.0


@pytest.fixture
def source(sparse_path: Path) -> Path:
    path = sparse_path / "source"
    path.write_bytes(bytes(MIB))
    return path


def described(path: Path) -> Description:
    """A MiB of a file, one of 'a', one of errors."""
    return Description(
        3 * MIB,
        [
            FileSegment(offset=0, length=MIB, path=str(path)),
            MemsetSegment(offset=MIB, length=MIB, byte=97),
            ErrorSegment(offset=2 * MIB, length=MIB),
        ],
    )


def test_a_server_tells_of_every_read(serve: Serve, source: Path) -> None:
    with serve(described(source), queues=2, depth=8) as server:
        before = server.stats().kinds
        # NB: not by turns, as one batch in four is timed of those that never wait.
        for start in (0, MIB):
            for block in range(40):
                read_direct(server.device, start + block * BLOCK, BLOCK)
        with pytest.raises(OSError):
            read_direct(server.device, 2 * MIB, BLOCK)
        stats = settled_stats(server)
        after = stats.kinds
        assert after["file"].reads == before["file"].reads + 40
        assert after["file"].read_bytes == before["file"].read_bytes + 40 * BLOCK
        assert after["file"].latency.reads.count == after["file"].reads
        assert after["memset"].reads == before["memset"].reads + 40
        assert 0 < after["memset"].latency.reads.count <= after["memset"].reads
        assert after["error"].errors > 0 and stats.refused == 0
        assert stats.errors == after["error"].errors
        for kind in ("file", "memset"):
            latency = after[kind].latency.reads
            values = [latency.percentile_ns(percent) for percent in (*PERCENTS, 100)]
            assert values == sorted(values) and values[0] > 64
        assert 1 <= len(stats.queues) <= 2
        assert all(queue.in_flight == 0 for queue in stats.queues)
        assert 1 <= max(queue.max_in_flight for queue in stats.queues) <= 8
    assert server.final_stats is not None
    assert server.final_stats.kinds["file"].reads >= after["file"].reads


def test_requests_in_flight_are_seen_and_their_time_is_counted(
    serve: Serve, source: Path
) -> None:
    """A server on another one's device, which is stopped for a while."""
    file = FileSegment(offset=0, length=MIB, path=str(source))
    with serve(Description(MIB, [file])) as slow:
        through = FileSegment(offset=0, length=MIB, path=str(slow.device), direct=True)
        with (
            serve(Description(MIB, [through]), queues=1, depth=8) as server,
            ThreadPoolExecutor(3) as pool,
        ):
            before = server.stats().kinds["file"].latency.reads
            freeze(slow.pid)
            try:
                reads = [
                    pool.submit(read_direct, server.device, at * BLOCK, BLOCK)
                    for at in (10, 20, 30)
                ]
                wait_until(lambda: server.stats().queues[0].in_flight == 3)
                time.sleep(0.3)
                assert server.stats().kinds["file"].latency.reads == before
            finally:
                os.kill(slow.pid, signal.SIGCONT)
            for read in reads:
                read.result(timeout=TIMEOUT_S)
            stats = settled_stats(server)
        latency = stats.kinds["file"].latency.reads.since(before)
        assert latency.count == 3 and latency.max_ns >= 300e6
        assert latency.percentile_ns(1) >= 300e6
        assert stats.queues[0].in_flight == 0 and stats.queues[0].max_in_flight >= 3


def settled_stats(server: BlockServer) -> ServerStats:
    """Statistics with the last answers, which a server counts once they are given."""
    wait_until(lambda: all(x.in_flight == 0 for x in server.stats().queues))
    return server.stats()
