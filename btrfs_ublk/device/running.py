"""Handle a server process that runs, even if another process has started it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from btrfs_ublk.base.process import (
    KILL_TIMEOUT_S,
    Child,
    ProcessIdentity,
    describe_exit,
    readable,
)

#: The time for a process that was continued to end; a debugger may still hold it.
_CONTINUE_TIMEOUT_S = 0.1


class RunningServer:
    """A process that is known by its pidfd, so no later one is mistaken for it."""

    def __init__(self, identity: ProcessIdentity, child: Child | None = None) -> None:
        """Raise ProcessLookupError when it has ended, unless it is our ``child``."""
        self.identity = identity
        self._child = child
        # A child stays the same process, and is reaped here, even if it has ended.
        self._pidfd = (
            os.pidfd_open(identity.pid) if child is not None else identity.open_pidfd()
        )

    @property
    def pid(self) -> int:
        return self.identity.pid

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when it ends."""
        return self._pidfd

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signum)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended within ``timeout_s`` seconds."""
        return bool(readable([self._pidfd], timeout_s=timeout_s))

    def kill(self) -> bool:
        """Kill it. Returns False when it hangs in the kernel."""
        self.signal(signal.SIGKILL)
        return self.wait(KILL_TIMEOUT_S)

    def how_it_ended(self) -> tuple[int | None, str]:
        """Return the exit status (None if only its parent knows it), and a text."""
        if self._child is not None:
            status = self._child.wait(0.0)
        else:
            status = self._reap()
        return status, "ended" if status is None else describe_exit(status)

    def _reap(self) -> int | None:
        # If our program has replaced itself since it started it, it is still our child.
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


def continue_process(identity: ProcessIdentity) -> None:
    """Continue a stopped process; kill it if a debugger keeps it stopped."""
    with suppress(ProcessLookupError):
        process = RunningServer(identity)
        try:
            process.signal(signal.SIGCONT)
            if is_stopped(identity) and not process.wait(_CONTINUE_TIMEOUT_S):
                if is_stopped(identity):
                    process.kill()
        finally:
            process.close()


def is_stopped(process: ProcessIdentity) -> bool:
    """Return whether a signal or a debugger has stopped the process."""
    with suppress(OSError):
        stat = Path(f"/proc/{process.pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()[0] in ("T", "t")
    return False
