"""null_blk, which does nothing at all: what the block layer alone costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.capabilities import ROOT, Capability, LoadableModule
from btrfs_ublk.resources import blockdev
from btrfs_ublk.resources.kernel_module import loaded_module
from btrfs_ublk.server import ZeroSegment
from btrfs_ublk.units import BLOCK_BYTES, GIB

_DEVICE = Path("/dev/nullb0")
_DEFAULT_DEPTH = 64
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class NullBlk:
    name: str = "null_blk"
    layer: Literal["device"] = "device"
    description: str = "null_blk: completes every request at once, reads zeroes"
    needs: Sequence[Capability] = (ROOT, LoadableModule("null_blk"))

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        parameters = {
            "nr_devices": 1,
            "gb": -(-setting.size_bytes // GIB),
            "bs": BLOCK_BYTES,
            "submit_queues": setting.queues or 1,
            "hw_queue_depth": setting.depth or _DEFAULT_DEPTH,
            "irqmode": 0,  # completed where it was submitted
        }
        with loaded_module("null_blk", parameters):
            blockdev.wait_for_node(_DEVICE, timeout_s=_TIMEOUT_S)
            content = ZeroSegment(offset=0, length=setting.size_bytes)
            yield Subject(_DEVICE, content, writable=True)


PEERS: Sequence[Peer] = [NullBlk()]
