"""Which front end it is to be: ublk where the kernel has it, else fuse."""

from __future__ import annotations

from typing import Literal

from btrfs_ublk.capabilities import FUSE, LOOP, ROOT, UBLK, require
from btrfs_ublk.errors import CapabilityError, UsageError
from btrfs_ublk.log import log
from btrfs_ublk.server.front_end import FrontEnd
from btrfs_ublk.server.fuse import FuseFrontEnd
from btrfs_ublk.server.ublk import UblkFrontEnd

FrontEndName = Literal["auto", "ublk", "fuse"]


def choose_front_end(
    name: FrontEndName = "auto", *, unprivileged: bool = False
) -> FrontEnd:
    """A new front end for one server; ``unprivileged``: for a user who is not root.
    Raises CapabilityError when this machine cannot do it, UsageError when none can.
    """
    if unprivileged:
        if name == "fuse":
            raise UsageError(
                "the front end fuse needs a loop device, which only root makes",
                hint="unprivileged devices are of ublk",
            )
        require(UBLK)
        return UblkFrontEnd()
    require(ROOT)
    if name == "ublk":
        require(UBLK)
        return UblkFrontEnd()
    if name == "fuse":
        require(FUSE, LOOP)
        return FuseFrontEnd()
    no_ublk = UBLK.probe()
    if no_ublk is None:
        log.info("front end ublk: %s is there", UBLK.path)
        return UblkFrontEnd()
    no_fuse = FUSE.probe() or LOOP.probe()
    if no_fuse is not None:
        raise CapabilityError(
            f"no front end works here: no ublk ({no_ublk}), and no fuse ({no_fuse})",
            hint=UBLK.cure,
        )
    log.info("front end fuse, because of no ublk: %s", no_ublk)
    return FuseFrontEnd()
