"""Names and limits, in a module that a command line imports at no cost."""

from __future__ import annotations

from typing import Literal

#: What makes a block device of it. "auto" is ublk if the kernel has that and survives
#: the death of its server, else fuse.
FrontEndName = Literal["auto", "ublk", "fuse"]
#: The longest deadline_s of a LazySegment.
MAX_DEADLINE_S = 24 * 3600
