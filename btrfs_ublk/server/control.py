"""The control connection: JSON lines on a socket to a server process
(docs/design/protocol.md)."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
import weakref
from typing import Any

from btrfs_ublk.base.process import Child, readable
from btrfs_ublk.content.refused import Refused
from btrfs_ublk.errors import BtrfsUblkError

#: A line of a server (a ready message, or statistics) is much shorter than this.
_MAX_LINE_BYTES = 1 << 20

Message = dict[str, Any]


class ControlError(BtrfsUblkError):
    """The server does not answer, or its answer is not valid."""


class HalfSent(TimeoutError):
    """A part of a request may have reached the server, so no other can follow."""


class InUseError(ControlError):
    """The server does not stop, because the device is mounted or claimed."""


def send_request(
    connection: socket.socket,
    name: str,
    keys: Message,
    *,
    fd: int | None,
    deadline_s: float,
) -> None:
    """Send a request on a non-blocking socket, with a descriptor if one is given.

    Raises TimeoutError when the server does not accept it by the deadline (HalfSent:
    when it accepted a part), and OSError.
    """
    line = json.dumps({"request": name} | keys).encode() + b"\n"
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    sent = 0
    while sent < len(line):
        try:
            if fd is None:
                sent += connection.send(line[sent:])
            else:
                sent += socket.send_fds(connection, [line[sent:]], [fd])
                fd = None
        except BlockingIOError:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
                raise (HalfSent if sent else TimeoutError) from None


def check_refusal(message: Message, name: str) -> None:
    """Raise Refused for a reply that explains why a request failed, or InUseError."""
    if message.get("in_use"):
        raise InUseError(f"the server refuses to {name}: the device is in use")
    if message.get("failed") == name:
        of = [(key, message[key]) for key in ("source", "mapping") if key in message]
        raise Refused(
            str(message.get("error")),
            hint=message.get("hint") or None,
            errno=str(message.get("errno")),
            of=of[0] if of else None,
        )


class ControlConnection:
    """Our end of the control socket. When it closes, the server takes us for dead, and
    stops."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._received = b""
        self._events: list[Message] = []
        #: How many requests are not answered yet. Replies come in order.
        self._unanswered = 0
        self._lock = threading.Lock()
        _connections.add(self)

    def server_fd(self) -> int:
        """The descriptor that the server inherits."""
        return self._theirs.fileno()

    def started(self) -> None:
        """Close the server's end here, now that the server has it. NB: otherwise its
        death would go unnoticed."""
        self._theirs.close()

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()

    def wait_event(self, name: str, *, child: Child, timeout_s: float) -> Message:
        """Wait for the server's next event of that name. Raises ControlError when the
        server ends, sends anything else, or nothing within ``timeout_s`` seconds."""
        with self._lock:
            self._check_open(f"wait for the {name} event")
            deadline_s = time.monotonic() + timeout_s
            message = (
                self._events.pop(0)
                if self._events
                else self._receive(child, deadline_s, what=f"the {name} event")
            )
        if message.get("event") != name:
            raise ControlError(f"the server sent {message}, not the {name} event")
        return message

    def request(
        self,
        name: str,
        keys: Message | None = None,
        *,
        child: Child,
        timeout_s: float,
        fd: int | None = None,
    ) -> Message:
        """Send a request and return the reply. Raises ControlError like wait_event(),
        and for an error; Refused for an error with a reason.

        Replies to earlier requests, whose wait was interrupted or timed out, are
        dropped.
        """
        with self._lock:
            self._check_open(f"ask the server to {name}")
            deadline_s = time.monotonic() + timeout_s
            # NB: count before sending: a signal may come in between. One too many only
            # makes a request time out; one too few would mix up all replies.
            self._unanswered += 1
            try:
                send_request(self._ours, name, keys or {}, fd=fd, deadline_s=deadline_s)
            except TimeoutError as error:
                if isinstance(error, HalfSent):
                    self.close()
                else:
                    self._unanswered -= 1
                raise ControlError(
                    f"the server does not take the request to {name}"
                ) from error
            except OSError as error:
                self._unanswered -= 1
                raise ControlError(
                    f"cannot ask the server to {name}: {error.strerror}"
                ) from error
            while True:
                message = self._receive(child, deadline_s, what=f"a reply to {name}")
                if "event" in message:
                    self._events.append(message)
                    continue
                self._unanswered -= 1
                if self._unanswered > 0:
                    continue
                if message.get("reply") == name:
                    return message
                check_refusal(message, name)
                raise ControlError(f"the server answers {name} with {message}")

    def _check_open(self, what: str) -> None:
        if self._ours.fileno() < 0:
            raise ControlError(
                f"cannot {what}: it took only a part of an earlier request"
            )

    def _receive(self, child: Child, deadline_s: float, *, what: str) -> Message:
        while b"\n" not in self._received:
            if len(self._received) > _MAX_LINE_BYTES:
                raise ControlError(f"the server sends an endless line, not {what}")
            remaining_s = deadline_s - time.monotonic()
            ours = self._ours.fileno()
            ready = readable([ours, child], timeout_s=remaining_s)
            if not ready:
                raise ControlError(f"the server did not send {what} in time")
            data = self._read() if ours in ready else b""
            if not data:
                raise ControlError(f"the server ended and did not send {what}")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ControlError(f"the server sent {line[:200]!r}, not {what}")
        return message

    def _read(self) -> bytes:
        try:
            return self._ours.recv(65536)
        except OSError:
            return b""


#: NB: a forked child that kept our end would keep the servers of a dead parent alive.
_connections: weakref.WeakSet[ControlConnection] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
