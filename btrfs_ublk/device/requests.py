"""Pass requests to a supervisor, which takes them only where it waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from btrfs_ublk.base.process import SupportsFileno, readable


class Detach(Exception):
    """Asks it to end, and to leave the server running."""


class Replace(Exception):
    """Asks it to read the device's new spec, or to let a newer program continue."""


class Requests:
    """Requests by any thread or signal handler, for one thread that waits. Close it."""

    def __init__(self) -> None:
        self._read_fd, self.wakeup_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._asked: set[type[Detach] | type[Replace]] = set()

    def ask(self, what: type[Detach] | type[Replace]) -> None:
        self._asked.add(what)
        with suppress(BlockingIOError):  # The pipe is full, so it is readable.
            os.write(self.wakeup_fd, b"\0")

    def fileno(self) -> int:
        """Return a descriptor that is readable when check() has something to raise."""
        return self._read_fd

    def check(self) -> None:
        """Raise what was asked for: Detach at each call, Replace once."""
        with suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        if Detach in self._asked:
            raise Detach
        if Replace in self._asked:
            self._asked.discard(Replace)
            raise Replace

    def wait(
        self, descriptors: Sequence[int | SupportsFileno], *, timeout_s: float
    ) -> set[int]:
        """Do as readable(), and raise what was asked for."""
        ready = readable([self, *descriptors], timeout_s=timeout_s)
        self.check()
        return ready - {self._read_fd}

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self.wakeup_fd)


@contextmanager
def requests_by_signals() -> Iterator[Requests]:
    """Make TERM and INT ask for Detach, and HUP for Replace. For the main thread."""
    asked = Requests()
    kinds: dict[int, type[Detach] | type[Replace]] = {
        signal.SIGTERM: Detach,
        signal.SIGINT: Detach,
        signal.SIGHUP: Replace,
    }

    def handle(signum: int, _frame: FrameType | None) -> None:
        asked.ask(kinds[signum])

    previous = {number: signal.signal(number, handle) for number in kinds}
    # NB: for a signal that comes just before poll(2), Python runs the handler after it.
    previous_fd = signal.set_wakeup_fd(asked.wakeup_fd, warn_on_full_buffer=False)
    try:
        # Our parent may have blocked them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, kinds)
        yield asked
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        asked.close()
