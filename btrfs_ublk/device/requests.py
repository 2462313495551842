"""What a supervisor is asked to do, by signals: they wake it up where it waits, and
nowhere else.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from btrfs_ublk.process import SupportsFileno, readable


class Detach(Exception):
    """TERM or INT: end, and leave the server serving."""


class Replace(Exception):
    """HUP: a newer version is to go on."""


class Requests:
    """Made by requests()."""

    def __init__(self, wakeup_fd: int) -> None:
        self._wakeup_fd = wakeup_fd
        self._asked: set[int] = set()

    def handle(self, signum: int, _frame: FrameType | None) -> None:
        self._asked.add(signum)

    def fileno(self) -> int:
        """Becomes readable with a signal; check() then says which."""
        return self._wakeup_fd

    def check(self) -> None:
        """Raise what was asked for."""
        with suppress(BlockingIOError):
            os.read(self._wakeup_fd, 4096)
        if self._asked & {signal.SIGTERM, signal.SIGINT}:
            raise Detach
        if signal.SIGHUP in self._asked:
            self._asked.discard(signal.SIGHUP)
            raise Replace

    def wait(
        self, descriptors: Sequence[int | SupportsFileno], *, timeout_s: float
    ) -> set[int]:
        """Those that can be read, as readable(); raises what was asked for."""
        ready = readable([self, *descriptors], timeout_s=timeout_s)
        self.check()
        return ready - {self._wakeup_fd}


@contextmanager
def requests() -> Iterator[Requests]:
    """To be entered by the main thread."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    asked = Requests(read_fd)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    previous = {number: signal.signal(number, asked.handle) for number in numbers}
    previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        # None is to stay blocked from who started us.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        yield asked
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(read_fd)
        os.close(write_fd)
