"""Killed servers without recovery, under verified reads."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.needs import may_be_killed
from support.verified_reads import VerifiedReads, verified_reads

from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.server import BlockServer, FrontEndName, PatternSegment
from btrfs_ublk.units import TIB
from btrfs_ublk.volume.temporary import volume

pytestmark = pytest.mark.data

#: What a read may take to fail once its server is dead.
FAIL_S = 30
SERVED_S = 60.0


@contextmanager
def readers(path: Path) -> Iterator[Sequence[VerifiedReads]]:
    """One of each kind, and both have read."""
    with ExitStack() as stack:
        found = [
            stack.enter_context(
                verified_reads(path, name=name, threads=threads, deadline_s=FAIL_S)
            )
            for name, threads in (("direct", None), ("mmap", 3))
        ]
        for reads in found:
            reads.mark()
            reads.wait_served(timeout_s=SERVED_S)
        yield found


def kill(server: BlockServer) -> None:
    identity = ProcessIdentity.of(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    assert identity.wait(timeout_s=FAIL_S)


def fail_soon(found: Sequence[VerifiedReads]) -> None:
    """Those in flight, and those that follow: at once, and none hangs."""
    time.sleep(1)
    for reads in found:
        report = reads.finish()
        assert report["reads"] > 0 and report["errors"] > 0, (reads.name, report)
        assert report["hung"] == report["wrong_bytes"] == 0, (reads.name, report)
        assert report["max_ns"] < FAIL_S * 1e9


def test_without_recovery_reads_of_a_mounted_seed_fail(
    front_end: FrontEndName, sparse_path: Path
) -> None:
    may_be_killed(front_end)
    target = sparse_path / "mnt"
    target.mkdir()
    pattern = PatternSegment(offset=0, length=TIB)
    with volume(
        target,
        [pattern],
        virtual_data_size=TIB,
        parent=sparse_path,
        front_end=front_end,
    ) as made:
        clone = made.clone("clone", offset=0, size_bytes=TIB)
        with readers(clone) as found:
            kill(made.server)
            fail_soon(found)
        if front_end == "fuse":  # ublk's device goes, and btrfs becomes read-only
            file = target / "file"
            file.write_bytes(b"on the other device")
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
            assert file.read_bytes() == b"on the other device"
