"""Every peer, one contract: the right bytes and nothing left, or a reason."""

import os
import random
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.needs import Need

from btrfs_ublk.base.capabilities import UBLK
from btrfs_ublk.base.readers import read_buffered, read_direct
from btrfs_ublk.bench.content import STAMPS, check_blocks, write_content
from btrfs_ublk.bench.peer import Peer, Subject, all_peers, setting, why_not
from btrfs_ublk.bench.peers.others import RUBLK
from btrfs_ublk.bench.reading import find_peers
from btrfs_ublk.bench.resources.kernel_module import LoadableModule
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError, UsageError
from btrfs_ublk.units import BLOCK_BYTES, MIB

SIZE = 24 * MIB


def assert_contract(names: Iterable[str], where: Path) -> set[str]:
    """Those that can run here do, all at once; their names."""
    known = all_peers()
    reasons = {known[name]: why_not(known[name]) for name in names}
    with setting(where, size_bytes=SIZE, queues=1, depth=16) as common:
        with ExitStack() as stack:
            for peer, reason in reasons.items():
                assert peer.layer in ("device", "file")
                assert peer.description and "\n" not in peer.description
                if reason is not None:
                    assert len(reason) > 10
                    continue
                try:
                    subject = stack.enter_context(peer.serving(common))
                except CapabilityError as error:
                    reasons[peer] = str(error)
                    continue
                assert_right(peer, subject)
        # Nothing is taken down before its time.
        assert common.directory.exists()
    return {peer.name for peer, reason in reasons.items() if reason is None}


def assert_right(peer: Peer, subject: Subject) -> None:
    check_blocks(
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


@pytest.mark.thorough
@pytest.mark.device
@pytest.mark.parametrize("name", all_peers())
def test_a_peer(name: str, sparse_path: Path) -> None:
    assert_contract([name], sparse_path)


@pytest.mark.ublk
def test_all_at_once_with_ublk(need: Need, sparse_path: Path) -> None:
    """Those that the other tests leave out: with ublk, and with modules of the VM."""
    need(UBLK)
    names = [
        name
        for name, peer in all_peers().items()
        if UBLK in peer.needs or any(isinstance(x, LoadableModule) for x in peer.needs)
    ]
    # One module makes that disk and the peer of this name, and only one at a time.
    names.remove("null_blk")
    ran = assert_contract(names, sparse_path) | assert_contract(
        ["null_blk"], sparse_path
    )
    assert {"ublk", "ublk-clone", "ublk-file", "ublk-file-clone"} <= ran
    if RUBLK.probe() is None:
        assert {"rublk-null", "rublk-loop"} <= ran
    if os.environ.get("BTRFS_UBLK_IN_VM") == "1":
        assert {"brd", "btrfs-brd", "null_blk"} <= ran


def test_unknown_peers_are_refused() -> None:
    for name in ("lop", "batch:lop", "slow:loop", ":loop"):
        with pytest.raises(UsageError, match=f"no peer {name!r}\n.*loop"):
            find_peers(["loop", name])
    with pytest.raises(UsageError, match="twice\n.*again:loop"):
        find_peers(["loop", "loop"])
    found = find_peers(["loop", "again:loop", "batch:loop"])
    assert [each.name for each in found] == ["loop", "again:loop", "batch:loop"]


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
            check_blocks(
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
