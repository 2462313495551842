"""Every peer, one contract: the right bytes and nothing left, or a reason."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from conftest import Need
from hypothesis import given
from hypothesis import strategies as st

from btrfs_ublk.bench.peer import (
    Peer,
    Subject,
    all_peers,
    find_peers,
    setting,
    why_not,
)
from btrfs_ublk.bench.peers.rublk import RUBLK
from btrfs_ublk.bench.stamps import STAMPS, check_content, write_content
from btrfs_ublk.capabilities import UBLK, LoadableModule
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.readers import read_buffered, read_direct
from btrfs_ublk.units import BLOCK_BYTES, MIB

SIZE = 24 * MIB


def assert_contract(names: Iterable[str], where: Path) -> set[str]:
    """Those that can run here do, all at once; their names."""
    reasons = {peer: why_not(peer) for peer in find_peers(list(names))}
    with setting(where, size_bytes=SIZE, queues=1, depth=16) as common:
        with ExitStack() as stack:
            for peer, reason in reasons.items():
                assert peer.layer in ("device", "file")
                assert peer.description and "\n" not in peer.description
                if reason is not None:
                    assert len(reason) > 10
                    continue
                subject = stack.enter_context(peer.serving(common))
                assert_right(peer, subject)
        # Nothing is taken down before its time.
        assert common.directory.exists()
    return {peer.name for peer, reason in reasons.items() if reason is None}


def assert_right(peer: Peer, subject: Subject) -> None:
    check_content(
        subject.path,
        subject.content,
        SIZE,
        read=read_direct if subject.direct else read_buffered,
        samples=50,
        chances=random.Random(3),
    )
    assert subject.path.is_block_device() == (peer.layer == "device")
    for pid in subject.server_pids:
        assert psutil.Process(pid).cmdline()


@pytest.mark.native
@pytest.mark.parametrize("name", all_peers())
def test_a_peer(name: str, sparse_path: Path) -> None:
    assert_contract([name], sparse_path)


@pytest.mark.native
def test_all_at_once(sparse_path: Path) -> None:
    ran = assert_contract(all_peers(), sparse_path)
    assert {"loop", "btrfs-loop", "tmpfs", "dev-zero"} <= ran


@pytest.mark.ublk
def test_all_at_once_with_ublk(need: Need, sparse_path: Path) -> None:
    """Those that the other tests leave out: with ublk, and with modules of the VM."""
    need(UBLK)
    names = [
        name
        for name, peer in all_peers().items()
        if UBLK in peer.needs or any(isinstance(x, LoadableModule) for x in peer.needs)
    ]
    ran = assert_contract(names, sparse_path)
    assert {"ublk", "ublk-clone", "ublk-file", "ublk-file-clone"} <= ran
    if RUBLK.probe() is None:
        assert {"rublk-null", "rublk-loop"} <= ran
    if os.environ.get("BTRFS_UBLK_IN_VM") == "1":
        assert {"brd", "btrfs-brd", "null_blk"} <= ran


def test_unknown_peers_are_refused() -> None:
    with pytest.raises(UsageError, match="no peer 'lop'\n.*loop"):
        find_peers(["loop", "lop"])
    with pytest.raises(UsageError, match="twice"):
        find_peers(["loop", "loop"])


class TestStamps:
    def test_no_two_blocks_are_alike(self) -> None:
        data = STAMPS.content(0, 4 * MIB)
        blocks = [data[at : at + BLOCK_BYTES] for at in range(0, 4 * MIB, BLOCK_BYTES)]
        assert len(set(blocks)) == len(blocks)
        for block in blocks[:: len(blocks) - 1]:
            assert len(zlib.compress(block)) > 4000

    @given(st.integers(0, 3 * MIB), st.integers(1, 9000))
    def test_a_part_is_a_part_of_the_whole(self, offset: int, length: int) -> None:
        whole = STAMPS.content(0, 4 * MIB)
        assert STAMPS.content(offset, length) == whole[offset : offset + length]

    def test_one_wrong_byte_is_found_and_named(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        write_content(path, STAMPS, SIZE)

        def check() -> None:
            check_content(
                *(path, STAMPS, SIZE),
                read=read_buffered,
                samples=2,
                chances=random.Random(1),
            )

        check()
        with path.open("r+b") as file:
            file.seek(SIZE - 3)
            byte = STAMPS.content(SIZE - 3, 1)[0] ^ 1
            file.write(bytes([byte]))
        with pytest.raises(BtrfsUblkError, match=f"byte {SIZE - 3} is {byte:02x}"):
            check()

    def test_what_is_too_small_cannot_be_filled(self, tmp_path: Path) -> None:
        with pytest.raises(OSError):
            write_content(Path("/dev/full"), STAMPS, MIB)
