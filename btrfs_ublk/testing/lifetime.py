"""Tracks what is up in this pytest process, so that it goes down in any case.

Fixtures remove what they made. If a session is interrupted, a second signal may cut
pytest's own teardown off. So the plugin removes what is still up when pytest ends, the
ledger (base/ledger.py) what is left when Python ends, and the guardian (guardian.py)
what is left by a process that was killed, or that has files of it open to its end.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import Protocol

import pytest


class Closable(Protocol):
    def close(self) -> None:
        """Remove everything; idempotent."""


class _Lifetime:
    def __init__(self) -> None:
        #: The oldest comes first.
        self.open: list[Closable] = []
        self.whole = ExitStack()


_KEY = pytest.StashKey[_Lifetime]()


def opened(config: pytest.Config, thing: Closable) -> None:
    """Note that something is about to be made. From the first one on, TERM and HUP
    unwind the session as Ctrl-C does, instead of killing pytest.
    """
    from btrfs_ublk.base.signals import deferred, interruptible

    if _KEY not in config.stash:
        with deferred():
            lifetime = config.stash[_KEY] = _Lifetime()
            lifetime.whole.enter_context(interruptible())
            if os.geteuid() == 0:  # only root has a ledger
                from btrfs_ublk.base.ledger import process_ledger
                from btrfs_ublk.testing.guardian import guarded

                lifetime.whole.enter_context(guarded(process_ledger()))
    config.stash[_KEY].open.append(thing)


def closed(config: pytest.Config, thing: Closable) -> None:
    with suppress(ValueError):
        config.stash[_KEY].open.remove(thing)


def end_of_session(config: pytest.Config) -> None:
    """Remove what fixtures have not removed, the youngest first."""
    lifetime = config.stash.get(_KEY, None)
    if lifetime is None:
        return
    from btrfs_ublk.base.signals import deferred
    from btrfs_ublk.errors import BtrfsUblkError

    with deferred():
        for thing in reversed(lifetime.open):
            # What cannot be removed now is in the ledger, and left to the guardian.
            with suppress(BtrfsUblkError):
                thing.close()
        lifetime.open.clear()
        lifetime.whole.close()
