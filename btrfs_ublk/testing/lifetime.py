"""What is up in this pytest process, and that it goes down however the process ends.

Fixtures take down what they made. An interrupted session may not come to that: a second
signal cuts pytest's own teardown off. So the plugin takes down what is still up when
pytest ends, the ledger (btrfs_ublk/ledger.py) what is left when Python does, and the
guardian (guardian.py) what was left by a process that was killed.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import Protocol

import pytest


class Closable(Protocol):
    def close(self) -> None:
        """Take all down; idempotent."""


class _Lifetime:
    def __init__(self) -> None:
        #: Oldest first.
        self.open: list[Closable] = []
        self.whole = ExitStack()


_KEY = pytest.StashKey[_Lifetime]()


def opened(config: pytest.Config, thing: Closable) -> None:
    """Something is about to be made. From the first one on, TERM and HUP unwind the
    session as Ctrl-C does; pytest would die of them, with all that is up.
    """
    from btrfs_ublk.interrupts import deferred, interruptible

    if _KEY not in config.stash:
        with deferred():
            lifetime = config.stash[_KEY] = _Lifetime()
            lifetime.whole.enter_context(interruptible())
            if os.geteuid() == 0:  # nobody else has a ledger
                from btrfs_ublk.ledger import process_ledger
                from btrfs_ublk.testing.guardian import guarded

                lifetime.whole.enter_context(guarded(process_ledger()))
    config.stash[_KEY].open.append(thing)


def closed(config: pytest.Config, thing: Closable) -> None:
    with suppress(ValueError):
        config.stash[_KEY].open.remove(thing)


def end_of_session(config: pytest.Config) -> None:
    """Take down what fixtures did not come to, the youngest first."""
    lifetime = config.stash.get(_KEY, None)
    if lifetime is None:
        return
    from btrfs_ublk.errors import BtrfsUblkError
    from btrfs_ublk.interrupts import deferred

    with deferred():
        for thing in reversed(lifetime.open):
            # NB: what cannot go now is still in the ledger, which says so at exit.
            with suppress(BtrfsUblkError):
                thing.close()
        lifetime.open.clear()
        lifetime.whole.close()
