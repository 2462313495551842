"""Fixtures: loop devices on new sparse files, or on given ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from btrfs_ublk.testing.factory import (
    Factory,
    factory_for_each_scope,
    one_for_each_scope,
)

if TYPE_CHECKING:
    from btrfs_ublk.kernel import LoopDevice

_SIZE_BYTES = 1 << 30


class LoopFactory(Factory["LoopDevice"]):
    """``make(size_bytes)``: a loop device on a new sparse file; ``make(file=PATH)``: on
    that one. Needs root.
    """

    def default(self) -> LoopDevice:
        """A loop device on a new sparse file of 1 GiB. Needs root."""
        return self()

    def __call__(
        self,
        size_bytes: int = _SIZE_BYTES,
        *,
        file: Path | None = None,
        read_only: bool = False,
        direct_io: bool = False,
    ) -> LoopDevice:
        """``size_bytes`` (a multiple of 4096) is the new file's size. See loop_device()
        for errors, and for the rest.
        """
        from btrfs_ublk.base.capabilities import LOOP, ROOT
        from btrfs_ublk.kernel import loop_device

        self.need(ROOT, LOOP)
        if file is None:
            file = self.directory() / "loop.img"
            with file.open("xb") as made:
                made.truncate(size_bytes)
        return self.hold(loop_device(file, read_only=read_only, direct_io=direct_io))


btrfs_ublk_loop, btrfs_ublk_loop_module, btrfs_ublk_loop_session = one_for_each_scope(
    LoopFactory
)
(
    btrfs_ublk_loop_factory,
    btrfs_ublk_loop_factory_module,
    btrfs_ublk_loop_factory_session,
) = factory_for_each_scope(LoopFactory)
