"""Choose the front end: ublk if the kernel has it and survives the death of its
servers, else fuse."""

from __future__ import annotations

import platform
import re

from btrfs_ublk.base.capabilities import FUSE, LOOP, ROOT, UBLK, require
from btrfs_ublk.base.log import log
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.server.front_end import FrontEnd
from btrfs_ublk.server.fuse import FuseFrontEnd
from btrfs_ublk.server.names import FrontEndName
from btrfs_ublk.server.ublk import UblkFrontEnd

#: From the first version to before the second, the driver may crash the kernel when a
#: server is killed: it lacks f40139fde527 (in 6.15 and 6.14.6; docs/limits.md). NB: no
#: feature flag of the driver shows whether it has that.
_CRASHING = (6, 7, 0), (6, 14, 6)


def choose_front_end(
    name: FrontEndName = "auto", *, only_ublk: bool = False
) -> FrontEnd:
    """Make the front end of a server. ``only_ublk``: something was asked for that fuse
    does not have. Raises CapabilityError when this machine lacks it."""
    require(ROOT)
    if name == "ublk":
        require(UBLK)
        return UblkFrontEnd()
    if name == "fuse":
        require(FUSE, LOOP)
        return FuseFrontEnd()
    no_ublk = UBLK.probe()
    no_fuse = FUSE.probe() or LOOP.probe()
    if no_ublk is not None and no_fuse is not None:
        raise CapabilityError(
            f"no front end works here: no ublk ({no_ublk}), and no fuse ({no_fuse})",
            hint=UBLK.hint,
        )
    if no_ublk is not None:
        log.info("front end fuse, because of no ublk: %s", no_ublk)
        return FuseFrontEnd()
    if no_fuse is None and not only_ublk and kernel_may_crash(platform.release()):
        log.info(
            "front end fuse, as Linux %s may crash when a ublk server is killed; "
            "ask for ublk to have it all the same",
            platform.release(),
        )
        return FuseFrontEnd()
    log.info("front end ublk: %s is there", UBLK.path)
    return UblkFrontEnd()


def kernel_may_crash(release: str) -> bool:
    """Return whether Linux ``release`` (of uname(1)) may crash when a ublk server is
    killed. A distribution may have fixed it without changing that number."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    if found is None:
        return False
    major, minor, patch = (int(number or 0) for number in found.groups())
    return _CRASHING[0] <= (major, minor, patch) < _CRASHING[1]
