"""What a test needs of the machine, and what does not apply to its kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
