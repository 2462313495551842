"""Ask servers by ``control``, a socket in the device's directory. The process that
starts a server makes it; all of the same user may connect (docs/design/protocol.md)."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from btrfs_ublk.base.process import SupportsFileno, readable
from btrfs_ublk.server.control import ControlError, Message, check_refusal, send_request

_NAME = "control"
#: The server answers as many clients at a time.
_BACKLOG = 16
_MAX_REPLY_BYTES = 1 << 20
#: Part of the error with which a server refuses more clients (control_server.c).
_BUSY = "places for clients are taken"
#: The time between two attempts to get a place.
_RETRY_S = 0.05


class Silent(ControlError):
    """The server did not answer in time: it hangs, or is stopped."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the server does not answer within {timeout_s:g} s")


class Busy(ControlError):
    """The server works, but has no place for another client."""


class Interrupted(Exception):
    """Another descriptor became readable before the answer came."""


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name of the directory that fits into 108 bytes (unix(7), sun_path)."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def listening_socket(directory: Path) -> socket.socket:
    """Make a server's socket. NB: close it once the server has inherited it, or the
    death of the server goes unnoticed here."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = directory / f".{_NAME}.new"
    try:
        new.unlink(missing_ok=True)
        with _short(directory) as short:
            listener.bind(f"{short}/{new.name}")
        new.chmod(0o600)
        listener.listen(_BACKLOG)
        new.replace(directory / _NAME)
    except BaseException:
        listener.close()
        raise
    return listener


def ask(
    directory: Path,
    request: str,
    keys: Message | None = None,
    *,
    timeout_s: float,
    unless: Sequence[int | SupportsFileno] = (),
    fd: int | None = None,
) -> Message:
    """Send a request, with ``keys`` and a descriptor ``fd``; return what the reply has
    at the request's name, if anything.

    Raises Refused when the server says why not, InUseError when it must not stop,
    Silent when it does not answer in time, Busy when it never had a place for us,
    ControlError for other errors, Interrupted once any of ``unless`` becomes readable.
    """
    deadline_s = time.monotonic() + timeout_s
    refusal: Busy | None = None
    while True:
        try:
            with _connected(directory) as connection:
                return _ask_on(connection, request, keys or {}, fd, deadline_s, unless)
        except BlockingIOError:
            pass  # No more clients may wait for a place.
        except Busy as error:
            refusal = error
        except TimeoutError:
            pass
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            # NB: after a refusal, the last attempt may have had very little time.
            raise refusal or Silent(timeout_s)
        # No event tells that a place becomes free.
        if readable(unless, timeout_s=min(_RETRY_S, remaining_s)):
            raise Interrupted


@contextmanager
def _connected(directory: Path) -> Iterator[socket.socket]:
    """Connect. Raises ControlError; BlockingIOError when no more clients may wait."""
    if (directory / _NAME).is_symlink():
        raise ControlError(
            f"{directory / _NAME} is a symbolic link: no server has made it"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            with _short(directory) as short:
                connection.connect(f"{short}/{_NAME}")
        except BlockingIOError:
            raise
        except OSError as error:
            raise ControlError(
                f"its server cannot be reached: {error.strerror}"
            ) from error
        yield connection


def _ask_on(
    connection: socket.socket,
    request: str,
    keys: Message,
    fd: int | None,
    deadline_s: float,
    unless: Sequence[int | SupportsFileno],
) -> Message:
    """Do as ask() on a connection. Raises TimeoutError, and what ask() raises."""
    # NB: a server that refused us has closed its end, but its reason can be read.
    with suppress(ConnectionError):
        send_request(connection, request, keys, fd=fd, deadline_s=deadline_s)
    received = b""
    while b"\n" not in received:
        if len(received) > _MAX_REPLY_BYTES:
            raise ControlError(
                f"the server's reply is longer than {_MAX_REPLY_BYTES} bytes"
            )
        ready = readable([connection, *unless], timeout_s=deadline_s - time.monotonic())
        if ready - {connection.fileno()}:
            raise Interrupted
        if not ready:
            raise TimeoutError
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            raise ControlError(f"the server hung up and did not answer {request}")
        received += data
    return _reply_in(received.partition(b"\n")[0], request)


def _reply_in(line: bytes, request: str) -> Message:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if isinstance(message, dict):
        if _BUSY in str(message.get("error")):
            raise Busy(f"the server says: {message['error']}")
        check_refusal(message, request)
        reply = message.get(request, {})
        if message.get("reply") == request and isinstance(reply, dict):
            return reply
    raise ControlError(f"the server answers {request} with {line[:200]!r}")
