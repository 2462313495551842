"""Requests to the daemon that concern volumes. A process of their own carries them out
(volume/answers.py), as what they do may wait for a mounted volume: neither supervisors
nor the daemon's lock may depend on that."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

from btrfs_ublk.base.process import RunningServer, launch
from btrfs_ublk.errors import BtrfsUblkError

#: docs/design/protocol.md describes them.
VOLUME_REQUESTS = ("list", "status", "fork", "forks", "drop", "snapshot")
#: The process has the memory of a Python interpreter, so it ends when nobody has asked
#: for so long.
_IDLE_S = 600.0
#: Who asks again within this time is likely to go on.
_AGAIN_S = 60.0


def error_reply(error: BtrfsUblkError) -> dict[str, Any]:
    """Return the reply to a request that fails."""
    hint = {} if error.hint is None else {"hint": error.hint}
    return {"error": error.message, **hint, "exit_status": error.exit_status}


class VolumeRequests:
    """The process that answers, started when it is needed. ``log`` gets its stderr."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._processes: list[RunningServer] = []
        #: Its end is that of the process, once that has answered what it was asked.
        self._socket: socket.socket | None = None
        self._idle_at_s = 0.0
        self._again_until_s = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether the process is there already."""
        self.tidy()
        return self._socket is not None

    def prepare(self) -> None:
        """Start the process for the next request, if the last one like this was a short
        time ago. Raises BtrfsUblkError."""
        now_s = time.monotonic()
        if now_s < self._again_until_s and not self.is_ready:
            self._start()
        self._again_until_s = now_s + _AGAIN_S

    def pass_on(self, message: bytes, connection: socket.socket) -> None:
        """Have it answer a request on its connection. Raises BtrfsUblkError."""
        fds = [connection.fileno()]
        for attempt in ("first", "last"):
            if not self.is_ready:
                self._start()
            assert self._socket is not None
            try:
                socket.send_fds(self._socket, [message], fds, socket.MSG_DONTWAIT)
                self._idle_at_s = time.monotonic() + _IDLE_S
                return
            except BlockingIOError as error:
                raise BtrfsUblkError(
                    "the daemon has too much to do", hint="try again"
                ) from error
            except OSError as error:  # the process has ended
                self._socket.close()
                self._socket = None
                if attempt == "last":
                    raise BtrfsUblkError(
                        f"the daemon cannot answer ({error.strerror})", hint="try again"
                    ) from error

    def idle_s(self) -> float | None:
        """Return the time until tidy() ends the process; None when there is none."""
        if self._socket is None:
            return None
        return max(0.0, self._idle_at_s - time.monotonic())

    def tidy(self) -> None:
        """Forget a process that has ended, and have one end that is not needed."""
        for process in [x for x in self._processes if x.wait(0.0)]:
            process.how_it_ended()  # NB: this reaps it, or it would be a zombie.
            process.close()
            self._processes.remove(process)
        if self._socket is not None:
            if not self._processes or time.monotonic() >= self._idle_at_s:
                self._socket.close()
                self._socket = None

    def end(self, *, timeout_s: float) -> None:
        """Have the process end when it has answered what it was asked, and wait for it:
        nobody else reaps it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for process in self._processes:
            process.wait(timeout_s)
        self.tidy()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = "btrfs_ublk.volume.answers"
        with theirs:
            child = launch(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                keep_open_fds=[theirs.fileno()],
                death_signal=None,
                new_session=True,
                talk=self._log,
            )
        self._socket = ours
        self._idle_at_s = time.monotonic() + _IDLE_S
        self._processes.append(RunningServer(child.identity, child))
