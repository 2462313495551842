"""The socket ``control`` in a device's directory: whoever starts a server listens on it
for it, and anybody of the same user may ask (README, "The control connection").
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from btrfs_ublk.process import SupportsFileno, readable
from btrfs_ublk.server.control import ControlError, Message

_NAME = "control"
#: As many as the server answers at a time.
_BACKLOG = 16
_MAX_REPLY_BYTES = 1 << 20


class Interrupted(Exception):
    """Something else asks for attention; the answer was not waited for."""


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of the directory that fits into 108 bytes (unix(7), sun_path)."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def listening_socket(directory: Path) -> socket.socket:
    """For a server to inherit. NB: close it then, or its death goes unseen here."""
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
    *,
    timeout_s: float,
    unless: Sequence[int | SupportsFileno] = (),
) -> Message:
    """What the server replies: what stands at the request's name, if anything.

    Raises ControlError when there is no reply in time, or an error; Interrupted as soon
    as one of ``unless`` becomes readable.
    """
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            with _short(directory) as short:
                connection.connect(f"{short}/{_NAME}")
            connection.send(json.dumps({"request": request}).encode() + b"\n")
        except BlockingIOError as error:
            raise ControlError("the server takes no more connections") from error
        except OSError as error:
            raise ControlError(f"no server listens: {error.strerror}") from error
        received = b""
        while b"\n" not in received:
            if len(received) > _MAX_REPLY_BYTES:
                raise ControlError("the server's reply has no end")
            ready = readable(
                [connection, *unless], timeout_s=deadline_s - time.monotonic()
            )
            if ready - {connection.fileno()}:
                raise Interrupted
            if not ready:
                raise ControlError(f"the server does not answer within {timeout_s:g} s")
            try:
                data = connection.recv(65536)
            except OSError:
                data = b""
            if not data:
                raise ControlError(f"the server ended and did not answer {request}")
            received += data
    try:
        message = json.loads(received.partition(b"\n")[0])
    except ValueError:
        message = None
    if not isinstance(message, dict) or message.get("reply") != request:
        raise ControlError(f"the server answers {request} with {received[:200]!r}")
    reply = message.get(request, {})
    if not isinstance(reply, dict):
        raise ControlError(f"the server answers {request} with {received[:200]!r}")
    return reply
