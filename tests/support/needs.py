"""What a test needs of the machine, how much of a long one is done, and what does not
apply to this kernel."""

import functools
import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import NoReturn

import pytest

from btrfs_ublk.server import BlockServer, FrontEndName
from btrfs_ublk.server.features import kernel_features

#: ``need(ROOT, LOOP)``: the fixture of tests/conftest.py.
Need = Callable[..., None]
#: ``BlockServer()`` for the test's front end.
Serve = Callable[..., BlockServer]


def inapplicable(reason: str) -> NoReturn:
    """End a test of what this kernel cannot have. Unlike after a skip, nothing is
    missing: scripts/test does not count it, as the test runs with another kernel.
    """
    pytest.skip(f"does not apply: {reason}")


@functools.cache
def _driver_has_known_crash() -> bool:
    # The fix itself cannot be detected, but kernels with `quiesce` (6.16) have it.
    ublk = kernel_features()[0][0]
    return not any(x.name == "quiesce" and x.offered for x in ublk.features)


def may_be_killed(front_end: FrontEndName) -> None:
    """End a test that kills servers under load if that may crash the kernel: with ublk
    of Linux 6.7 to 6.14 (f40139fde527 is in 6.15), one of some 25 kills is a panic.
    """
    if front_end == "ublk" and _driver_has_known_crash():
        inapplicable(
            "this kernel may crash when ublk servers are killed: docs/limits.md"
        )


SOAK_PERCENT = int(os.environ.get("BTRFS_UBLK_SOAK_PERCENT", "10"))


def share_of(whole: int, *, least_percent: int = 0) -> int:
    """Return how much is done of what is ``whole`` with 100 %."""
    return whole * max(SOAK_PERCENT, least_percent) // 100


def rounds(whole: int) -> list[object]:
    """Return the parameters 0 to ``whole`` - 1: the gate does two of these rounds."""
    later = (pytest.param(x, marks=pytest.mark.thorough) for x in range(2, whole))
    return [*range(2), *later]


def moments() -> Iterator[int]:
    """Return numbers of events at which something is killed, for ever: all of them with
    100 %, else one in seven, as each takes a fork of this process."""
    return count(1, 1 if SOAK_PERCENT >= 100 else 7)
