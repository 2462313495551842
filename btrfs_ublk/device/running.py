"""A server process that runs, whoever started it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from btrfs_ublk.process import (
    KILL_TIMEOUT_S,
    Child,
    ProcessIdentity,
    describe_exit,
    readable,
)


class RunningServer:
    """One process, known by its pidfd: no later one can be mistaken for it."""

    def __init__(self, identity: ProcessIdentity, child: Child | None = None) -> None:
        """Raise ProcessLookupError when it has ended."""
        self.identity = identity
        self._child = child
        self._pidfd = os.pidfd_open(identity.pid)
        # Looked at with the pidfd open: from here on it can be no other process.
        if child is None and not identity.is_alive():
            os.close(self._pidfd)
            raise ProcessLookupError(f"there is no process {identity.pid}")

    @property
    def pid(self) -> int:
        return self.identity.pid

    def fileno(self) -> int:
        """Becomes readable when it ends."""
        return self._pidfd

    def signal(self, signum: signal.Signals) -> None:
        """Nothing happens when it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signum)

    def wait(self, timeout_s: float) -> bool:
        """True when it has ended within ``timeout_s`` seconds."""
        return bool(readable([self._pidfd], timeout_s=timeout_s))

    def kill(self) -> bool:
        """True when it has ended; False when it hangs in the kernel."""
        self.signal(signal.SIGKILL)
        return self.wait(KILL_TIMEOUT_S)

    def how_it_ended(self) -> tuple[int | None, str]:
        """Exit status (None where only its parent knows), and in words."""
        if self._child is not None:
            status = self._child.wait(0.0)
        else:
            status = self._reap()
        return status, "ended" if status is None else describe_exit(status)

    def _reap(self) -> int | None:
        # It is our child all the same when we have replaced our own program meanwhile.
        with suppress(ChildProcessError):
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                return result.si_status if exited else -result.si_status
        return None

    def close(self) -> None:
        os.close(self._pidfd)
        if self._child is not None:
            self._child.close()
