"""Turn signals into exceptions, and defer them where they must not interrupt.

A signal becomes an exception (``KeyboardInterrupt``, or ``Interrupted`` for TERM and
HUP), so that the same ``with`` blocks clean up after it as after any other error.
Code that makes a thing and notes it, and code that removes one, runs in ``deferred()``:
a second Ctrl-C waits until the teardown is complete.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from btrfs_ublk.base.records import dataclass

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: A swallowed signal is sent again after this time; the finaliser should end in it.
_REPEAT_S = 0.01
_Handler = Callable[[int, FrameType | None], object]


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP asked this process to stop; it unwinds as after Ctrl-C."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def exit_status_of(error: KeyboardInterrupt) -> int:
    """Return 128 + signal number, as shells do for a process that a signal ended."""
    return 128 + (error.signum if isinstance(error, Interrupted) else signal.SIGINT)


def _raise_interrupted(signum: int, _frame: FrameType | None) -> None:
    raise Interrupted(signum)


@contextmanager
def interruptible(*, exiting: bool = False) -> Iterator[None]:
    """Make TERM and HUP raise Interrupted inside the block; for entry points.

    ``exiting``: the process ends after the block. Once interrupted, it ignores all
    further signals, so that none interrupts what is done at exit. Outside the main
    thread, where Python allows no handlers, this does nothing.
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
            # A signal that our parent has set to be ignored (nohup) stays ignored.
            if handler is not signal.SIG_IGN:
                previous[number] = handler
                if number != signal.SIGINT:
                    signal.signal(number, _raise_interrupted)
                elif handler is signal.SIG_DFL:  # see btrfs_ublk/__init__.py
                    signal.signal(number, signal.default_int_handler)
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


@contextmanager
def importing() -> Iterator[None]:
    """Make signals end the process at once, for imports within ``interruptible()``,
    before anything is made. Python would turn exceptions of signals into others."""
    ours = _is_main_thread() and signal.getsignal(signal.SIGTERM) is _raise_interrupted
    before = {number: signal.getsignal(number) for number in _SIGNALS} if ours else {}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def too_late() -> None:
    """Ignore signals from here to the end of the process: its work is done, and only
    the result will be printed. For entry points, within ``deferred()``."""
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _repeat_swallowed(
    hook: Callable[[sys.UnraisableHookArgs], object], unraisable: sys.UnraisableHookArgs
) -> None:
    """Send a signal again whose exception was swallowed in a finaliser (``__del__``).

    A timer's thread does it; here, it would be swallowed again. All other exceptions
    go to ``hook``."""
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
    depth: int  # The depth to return to when it is closed.
    outer: _Window | None


class _Deferral:
    """Collects the signals that arrive while the depth is above zero (main thread)."""

    def __init__(self) -> None:
        self.depth = 0
        #: The window of the innermost delivered() that is open.
        self.window: _Window | None = None
        self.pending: list[int] = []
        #: The previous handler of each signal that ``_dispatch`` now handles.
        self.handlers: dict[int, _Handler] = {}

    def _dispatch(self, signum: int, frame: FrameType | None) -> None:
        if self.depth > 0:
            self.pending.append(signum)
        else:
            if self.window is not None:
                self.close_window(self.window)
            self.handlers[signum](signum, frame)

    # NB: while the depth is zero, a signal may raise between any two lines below.

    def enter(self) -> None:
        if self.depth > 0:
            self.depth += 1
            return
        self.pending.clear()
        for signum in _SIGNALS:
            handler = signal.getsignal(signum)
            # Only signals with a handler are deferred: a default SIGTERM still kills.
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
                # The first one decides the exit status; the others are dropped.
                signal.raise_signal(self.pending[0])

    def open_window(self) -> _Window:
        """Undo the innermost enter() for a while."""
        window = self.window = _Window(self.depth, self.window)
        self.depth -= 1
        if self.depth == 0 and self.pending:
            signal.raise_signal(self.pending.pop(0))
        return window

    def close_window(self, window: _Window) -> None:
        # NB: do it only once. A signal closes it as well, and the generator of
        # delivered() may be finalised much later, with a traceback that refers to it.
        if self.window is window:
            self.depth, self.window = window.depth, window.outer

    def replace(self, signum: int, handler: _Handler | int | None) -> None:
        """Set the handler for the time after the deferral."""
        if callable(handler) and signal.getsignal(signum) == self._dispatch:
            self.handlers[signum] = handler
        else:
            signal.signal(signum, handler)


#: A process has one, because it has one set of handlers. Only the main thread uses it.
_deferral = _Deferral()


def forget_handlers() -> None:
    """Handle signals as a program does that was just executed; for a forked child."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    sys.unraisablehook = sys.__unraisablehook__
    global _deferral
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
        _deferral.pending.clear()  # This process is stopping already.
        raise
    finally:
        _deferral.leave()


@contextmanager
def delivered() -> Iterator[None]:
    """Let signals interrupt a wait within ``deferred()``.

    The first signal that raises closes this window at once: signals are deferred again
    before cleanup begins, so no second one comes in between. When a caller has deferred
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
