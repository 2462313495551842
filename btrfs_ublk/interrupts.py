"""Signals as exceptions, and stretches of code that they may not cut in two.

A signal becomes an exception (``KeyboardInterrupt``, or ``Interrupted`` for TERM and
HUP), so that the same ``with`` blocks clean up after it as after any other error.
Making a thing and noting that it was made, and all of taking it down, stand in
``deferred()``: a second Ctrl-C waits until the teardown is whole.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], object]


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP asked this process to stop; unwinds as Ctrl-C does."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def exit_status_of(error: KeyboardInterrupt) -> int:
    """128 + signal number, as shells report a process that a signal ended."""
    return 128 + (error.signum if isinstance(error, Interrupted) else signal.SIGINT)


def _raise_interrupted(signum: int, _frame: FrameType | None) -> None:
    raise Interrupted(signum)


@contextmanager
def interruptible() -> Iterator[None]:
    """TERM and HUP raise Interrupted inside the block; for entry points.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {}
    try:
        for signum in (signal.SIGTERM, signal.SIGHUP):
            # A signal that whoever started us ignores (nohup) stays ignored.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                previous[signum] = signal.signal(signum, _raise_interrupted)
        yield
    finally:
        with deferred():
            for signum, handler in previous.items():
                _deferral.replace(signum, handler)


class _Deferral:
    """Collects the signals that arrive while the depth is above zero (main thread)."""

    def __init__(self) -> None:
        self.depth = 0
        self.pending: list[int] = []
        #: What was in force for each signal that ``_dispatch`` stands in for.
        self.handlers: dict[int, _Handler] = {}

    def _dispatch(self, signum: int, frame: FrameType | None) -> None:
        if self.depth > 0:
            self.pending.append(signum)
        else:
            # A signal came while leave() was putting handlers back.
            self.handlers[signum](signum, frame)

    def enter(self) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        try:
            for signum in _SIGNALS:
                handler = signal.getsignal(signum)
                # Only what would raise is deferred: an untouched SIGTERM still kills.
                if callable(handler) and handler != self._dispatch:
                    self.handlers[signum] = handler
                    signal.signal(signum, self._dispatch)
        except BaseException:
            self.depth -= 1
            raise

    def leave(self) -> None:
        self.depth -= 1
        if self.depth > 0:
            return
        pending, self.pending = self.pending, []
        try:
            for signum, handler in self.handlers.items():
                if signal.getsignal(signum) == self._dispatch:
                    signal.signal(signum, handler)
        finally:
            if pending:
                # The first one decides the exit status; the others meant the same.
                signal.raise_signal(pending[0])

    def replace(self, signum: int, handler: _Handler | int | None) -> None:
        """Set the handler that is to be in force after the deferral."""
        if callable(handler) and signal.getsignal(signum) == self._dispatch:
            self.handlers[signum] = handler
        else:
            signal.signal(signum, handler)


#: One per process, because signal handlers are; only the main thread touches it.
_deferral = _Deferral()


@contextmanager
def deferred() -> Iterator[None]:
    """Hold INT, TERM and HUP back until the block is left, then deliver them.

    Nests. In other threads it does nothing, because Python runs handlers in the main
    thread only. Keep waits inside short or bounded: Ctrl-C has no effect meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _deferral.enter()
    try:
        yield
    finally:
        _deferral.leave()
