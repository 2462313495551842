"""Signals as exceptions, and stretches of code that they may not cut in two.

A signal becomes an exception (``KeyboardInterrupt``, or ``Interrupted`` for TERM and
HUP), so that the same ``with`` blocks clean up after it as after any other error.
Making a thing and noting that it was made, and all of taking it down, stand in
``deferred()``: a second Ctrl-C waits until the teardown is whole.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Until a swallowed signal is sent again: the finaliser should have ended.
_REPEAT_S = 0.01
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
def interruptible(*, exiting: bool = False) -> Iterator[None]:
    """TERM and HUP raise Interrupted inside the block; for entry points.

    ``exiting``: the process ends after the block. Once it was interrupted, further
    signals are ignored for good, so that none cuts off what is done at exit. Outside
    the main thread, where Python allows no handlers, this does nothing.
    """
    if not _is_main_thread():
        yield
        return
    previous: dict[int, _Handler | int | None] = {}
    after = previous
    hook = sys.unraisablehook
    sys.unraisablehook = partial(_repeat_swallowed, hook)
    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            # A signal that whoever started us ignores (nohup) stays ignored.
            if handler is not signal.SIG_IGN:
                previous[number] = handler
                if number != signal.SIGINT:
                    signal.signal(number, _raise_interrupted)
        yield
    except KeyboardInterrupt:
        if exiting:
            after = dict.fromkeys(previous, signal.SIG_IGN)
        raise
    finally:
        with deferred():
            sys.unraisablehook = hook
            for signum, handler in after.items():
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    _deferral.replace(signum, handler)


def too_late() -> None:
    """Ignore signals from here to the end of the process: what they might undo is done,
    and is only to be told. For entry points, within ``deferred()``.
    """
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _repeat_swallowed(
    hook: Callable[[sys.UnraisableHookArgs], object], unraisable: sys.UnraisableHookArgs
) -> None:
    """Python swallows what a signal raises in a finaliser (``__del__``): send it again.

    From another thread, as here it would be swallowed again. All else goes to ``hook``.
    """
    error = unraisable.exc_value
    if not isinstance(error, KeyboardInterrupt):
        hook(unraisable)
        return
    signum = error.signum if isinstance(error, Interrupted) else signal.SIGINT
    main_thread = threading.main_thread().ident
    if main_thread is not None:
        arguments = (main_thread, signum)
        threading.Timer(_REPEAT_S, signal.pthread_kill, arguments).start()


@dataclass(frozen=True, eq=False)
class _Window:
    depth: int  # to go back to
    outer: _Window | None


class _Deferral:
    """Collects the signals that arrive while the depth is above zero (main thread)."""

    def __init__(self) -> None:
        self.depth = 0
        #: The innermost delivered() that is open.
        self.window: _Window | None = None
        self.pending: list[int] = []
        #: What was in force for each signal that ``_dispatch`` stands in for.
        self.handlers: dict[int, _Handler] = {}

    def _dispatch(self, signum: int, frame: FrameType | None) -> None:
        if self.depth > 0:
            self.pending.append(signum)
        else:
            if self.window is not None:
                self.close_window(self.window)
            self.handlers[signum](signum, frame)

    # NB: with the depth at zero a signal may raise between any two lines of these.

    def enter(self) -> None:
        if self.depth > 0:
            self.depth += 1
            return
        self.pending.clear()
        for signum in _SIGNALS:
            handler = signal.getsignal(signum)
            # Only what would raise is deferred: an untouched SIGTERM still kills.
            if callable(handler) and handler != self._dispatch:
                self.handlers[signum] = handler
                signal.signal(signum, self._dispatch)
        self.depth = 1

    def leave(self) -> None:
        self.depth -= 1
        if self.depth > 0 or self.window is not None:
            return
        try:
            for signum, handler in self.handlers.items():
                if signal.getsignal(signum) == self._dispatch:
                    signal.signal(signum, handler)
        finally:
            if self.pending:
                # The first one decides the exit status; the others meant the same.
                signal.raise_signal(self.pending[0])

    def open_window(self) -> _Window:
        """Undo the innermost enter() for a while."""
        window = self.window = _Window(self.depth, self.window)
        self.depth -= 1
        if self.depth == 0 and self.pending:
            signal.raise_signal(self.pending.pop(0))
        return window

    def close_window(self, window: _Window) -> None:
        # NB: once only. A signal closes it as well, and the generator of delivered()
        # may be finalised much later, with the traceback that refers to it.
        if self.window is window:
            self.depth, self.window = window.depth, window.outer

    def replace(self, signum: int, handler: _Handler | int | None) -> None:
        """Set the handler that is to be in force after the deferral."""
        if callable(handler) and signal.getsignal(signum) == self._dispatch:
            self.handlers[signum] = handler
        else:
            signal.signal(signum, handler)


#: One per process, because signal handlers are; only the main thread touches it.
_deferral = _Deferral()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def deferred() -> Iterator[None]:
    """Hold INT, TERM and HUP back until the block is left, then deliver them.

    Nests. In other threads it does nothing, because Python runs handlers in the main
    thread only. Keep waits inside short or bounded: Ctrl-C has no effect meanwhile.
    """
    if not _is_main_thread():
        yield
        return
    _deferral.enter()
    try:
        yield
    except KeyboardInterrupt:
        _deferral.pending.clear()  # we are stopping already
        raise
    finally:
        _deferral.leave()


@contextmanager
def delivered() -> Iterator[None]:
    """Within ``deferred()``, a wait that a signal may end.

    The signal that raises closes the window at once: what cleans up after it is
    deferred again, and no second signal comes in between. When a caller has deferred
    signals as well, they stay deferred.
    """
    if not _is_main_thread():
        yield
        return
    window = _deferral.open_window()
    try:
        yield
    finally:
        _deferral.close_window(window)
