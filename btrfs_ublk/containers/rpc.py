"""A server of gRPC over Unix sockets: HTTP/2 (RFC 9113) as gRPC uses it
(doc/PROTOCOL-HTTP2.md of grpc).

grpcio's server passes each call through three threads, which costs more than most
calls here (docs/design/containers.md). In this one, the thread that reads a connection
answers what waits for nothing, and a pool answers the rest.
"""

from __future__ import annotations

import logging
import socket
import string
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import IntEnum
from urllib.parse import quote

from btrfs_ublk.containers.hpack import Decoder, Header, InvalidHeadersError, encode

log = logging.getLogger(__name__)


class Code(IntEnum):
    """The status codes of gRPC that are used here."""

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class CallError(Exception):
    """What a call is answered with, instead of a message."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GO_AWAY = 0, 1, 3, 4, 6, 7
_WINDOW_UPDATE, _CONTINUATION = 8, 9
#: Flags of frames. NB: those of two types have the same bit.
_ACK = _END_STREAM = 1
_END_HEADERS, _PADDED, _PRIORITY = 4, 8, 0x20
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 4, 5
_DEFAULT_WINDOW, _FRAME_BYTES = 65_535, 16_384
_MOST_WINDOW = (1 << 31) - 1
#: Of a message, as with all others of gRPC.
_MOST_MESSAGE_BYTES = 4 << 20
_MOST_HEADER_BYTES = 64 << 10
#: So much may come before the sender has to be told that it was read.
_WINDOW = 16 << 20
_MOST_TEXT = 4096
_PLAIN = string.punctuation.replace("%", "") + " "
_HEAD = encode([(":status", "200"), ("content-type", "application/grpc")])
_FINE = encode([("grpc-status", "0")])


class _BrokenError(Exception):
    """A connection's other end does not speak HTTP/2, or not this one's part of it."""


@dataclass
class Asked:
    """A call: its metadata, and whether somebody still waits for the answer."""

    path: str
    metadata: list[Header]
    is_wanted: bool = True
    window: int = 0  # how much of the answer may be sent
    data: bytearray = field(default_factory=bytearray)

    def message(self) -> bytes:
        """Return its only message. Raises CallError."""
        size = int.from_bytes(self.data[1:5])
        if len(self.data) < 5 or len(self.data) != 5 + size or self.data[0]:
            raise CallError(Code.UNIMPLEMENTED, "it is not one plain message")
        return bytes(self.data[5:])


@dataclass(frozen=True)
class Method:
    """``answer`` gets a message, and returns those of the answer; it raises CallError.
    If it ``waits`` for anything, it is called in another thread."""

    answer: Callable[[bytes, Asked], Iterable[bytes]]
    waits: bool = True


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3) + bytes((kind, flags))
    return head + stream.to_bytes(4) + payload


class Server:
    """Answers calls of ``methods``, by their paths, at a socket that listens."""

    def __init__(
        self, listener: socket.socket, methods: Mapping[str, Method], *, workers: int
    ) -> None:
        self.methods = methods
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="call")
        self._listener = listener
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._stopped = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                if self._stopped.is_set():
                    return
                log.warning("cannot take a connection: %s", error)
                if self._stopped.wait(0.1):  # as there are too many files
                    return
                continue
            connection = _Connection(self, accepted)
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: _Connection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                self._connections.discard(connection)

    def wait(self) -> None:
        """Wait until it is stopped."""
        self._stopped.wait()

    def stop(self, grace_s: float) -> None:
        """Take no more calls, and wait for those that run, but not longer than that."""
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for each in connections:
            each.go_away()
        running = [one for each in connections for one in each.running]
        wait(running, grace_s)
        self.pool.shutdown(wait=False, cancel_futures=True)
        for each in connections:
            each.close()


class _Connection:
    def __init__(self, server: Server, accepted: socket.socket) -> None:
        self._server = server
        self._socket = accepted
        self._file = accepted.makefile("rb", buffering=1 << 16)
        self._decoder = Decoder()
        self._streams: dict[int, Asked] = {}
        self._sending = threading.Lock()
        #: Of all below: how much may be sent; it is told when that grows.
        self._room = threading.Condition()
        self._window = self._stream_window = _DEFAULT_WINDOW
        self._frame_bytes = _FRAME_BYTES
        self._unread = 0
        self._is_open = True
        self.running: set[Future[None]] = set()

    def run(self) -> None:
        """Read frames until there are no more."""
        try:
            if self._read(len(_PREFACE)) != _PREFACE:
                raise _BrokenError("it does not begin as HTTP/2 does")
            settings = _INITIAL_WINDOW_SIZE.to_bytes(2) + _WINDOW.to_bytes(4)
            more = (_WINDOW - _DEFAULT_WINDOW).to_bytes(4)
            self._send(
                _frame(_SETTINGS, 0, 0, settings), _frame(_WINDOW_UPDATE, 0, 0, more)
            )
            while head := self._file.read(9):
                self._take(*self._whole_frame(head))
        except (_BrokenError, InvalidHeadersError) as error:
            log.warning("a connection is closed: %s", error)
        except (OSError, ValueError, IndexError) as error:
            log.debug("a connection is closed: %r", error)
        finally:
            self.close()
            self._file.close()
            self._socket.close()

    def _read(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        if len(data) < size:
            raise ConnectionError("it ends early")
        return data

    def _whole_frame(self, head: bytes) -> tuple[int, int, int, bytes]:
        if len(head) < 9:
            raise ConnectionError("it ends early")
        size = int.from_bytes(head[:3])
        if size > _FRAME_BYTES:
            raise _BrokenError(f"a frame has {size} bytes")
        stream = int.from_bytes(head[5:]) & _MOST_WINDOW
        return head[3], head[4], stream, self._read(size)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._take_data(flags, stream, payload)
        elif kind == _HEADERS:
            self._take_headers(flags, stream, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._take_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._send(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            self._grow(stream, int.from_bytes(payload[:4]) & _MOST_WINDOW)
        elif kind == _RESET:
            self._forget(stream)
        elif kind == _CONTINUATION:
            raise _BrokenError("headers go on that have not begun")

    def _take_headers(self, flags: int, stream: int, payload: bytes) -> None:
        block = _unpadded(flags, payload)
        if flags & _PRIORITY:
            block = block[5:]
        while not flags & _END_HEADERS:
            kind, more, of, payload = self._whole_frame(self._read(9))
            if kind != _CONTINUATION or of != stream:
                raise _BrokenError("headers do not go on")
            flags |= more & _END_HEADERS
            block += payload
            if len(block) > _MOST_HEADER_BYTES:
                raise _BrokenError("headers are too long")
        headers = self._decoder.decode(block)
        if stream not in self._streams:  # else they are what ends it
            path = dict(headers).get(":path", "")
            asked = Asked(path, headers, window=self._stream_window)
            with self._room:
                self._streams[stream] = asked
        if flags & _END_STREAM:
            self._begin(stream)

    def _take_data(self, flags: int, stream: int, payload: bytes) -> None:
        self._unread += len(payload)
        if self._unread > _WINDOW // 2:
            more = self._unread.to_bytes(4)
            self._unread = 0
            self._send(_frame(_WINDOW_UPDATE, 0, 0, more))
        if (asked := self._streams.get(stream)) is None:
            return
        asked.data += _unpadded(flags, payload)
        if len(asked.data) > _MOST_MESSAGE_BYTES:
            error = CallError(Code.RESOURCE_EXHAUSTED, "the message is too large")
            self._end(stream, asked, b"", error)
        elif flags & _END_STREAM:
            self._begin(stream)

    def _take_settings(self, payload: bytes) -> None:
        for at in range(0, len(payload) - 5, 6):
            key = int.from_bytes(payload[at : at + 2])
            value = int.from_bytes(payload[at + 2 : at + 6])
            with self._room:
                if key == _INITIAL_WINDOW_SIZE:
                    for each in self._streams.values():
                        each.window += value - self._stream_window
                    self._stream_window = value
                elif key == _MAX_FRAME_SIZE:
                    self._frame_bytes = value
                self._room.notify_all()
        self._send(_frame(_SETTINGS, _ACK, 0))

    def _grow(self, stream: int, more: int) -> None:
        with self._room:
            if not stream:
                self._window += more
            elif stream in self._streams:
                self._streams[stream].window += more
            self._room.notify_all()

    def _forget(self, stream: int) -> None:
        with self._room:
            if (asked := self._streams.pop(stream, None)) is not None:
                asked.is_wanted = False
            self._room.notify_all()

    def _begin(self, stream: int) -> None:
        """Answer a call, here or in another thread."""
        asked = self._streams[stream]
        method = self._server.methods.get(asked.path)
        if method is None:
            error = CallError(Code.UNIMPLEMENTED, f"there is no {asked.path}")
            self._end(stream, asked, b"", error)
        elif method.waits:
            self._submit(self._answer, stream, asked, method)
        else:
            self._answer(stream, asked, method, may_wait=False)

    def _submit(self, function: Callable[..., None], *arguments: object) -> None:
        running = self._server.pool.submit(function, *arguments)
        self.running.add(running)
        running.add_done_callback(self.running.discard)

    def _answer(
        self, stream: int, asked: Asked, method: Method, may_wait: bool = True
    ) -> None:
        body, error = bytearray(), None
        try:
            for message in method.answer(asked.message(), asked):
                body += bytes(1) + len(message).to_bytes(4) + message
        except CallError as raised:
            error = raised
        except Exception:
            log.exception("%s failed", asked.path)
            error = CallError(Code.UNKNOWN, "the server has a defect; see its log")
        try:
            if may_wait or self._has_room(asked, len(body)):
                self._end(stream, asked, bytes(body), error)
            else:
                self._submit(self._end, stream, asked, bytes(body), error)
        except OSError as closed:
            log.debug("nobody waits for %s: %s", asked.path, closed)

    def _has_room(self, asked: Asked, size: int) -> bool:
        with self._room:
            return size <= min(self._window, asked.window)

    def _end(
        self, stream: int, asked: Asked, body: bytes, error: CallError | None
    ) -> None:
        """Send all of an answer. It waits until the other end takes it."""
        if error is not None:
            text = quote(str(error)[:_MOST_TEXT], safe=_PLAIN)
            told: list[Header] = [("grpc-status", str(int(error.code)))]
            last = encode([*told, ("grpc-message", text)])
            parts = [_frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, _HEAD + last)]
        else:
            parts, at = [_frame(_HEADERS, _END_HEADERS, stream, _HEAD)], 0
            while at < len(body):
                size = self._take_room(asked, len(body) - at)
                if not size:
                    return
                parts.append(_frame(_DATA, 0, stream, body[at : at + size]))
                at += size
                if at < len(body):
                    self._send(*parts)
                    parts = []
            parts.append(_frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, _FINE))
        if asked.is_wanted:
            self._forget(stream)
            self._send(*parts)

    def _take_room(self, asked: Asked, wanted: int) -> int:
        """Return how much may be sent, once it is something; 0: nobody waits for it."""
        with self._room:
            while asked.is_wanted and self._is_open:
                size = min(wanted, self._window, asked.window, self._frame_bytes)
                if size > 0:
                    self._window -= size
                    asked.window -= size
                    return size
                self._room.wait()
        return 0

    def _send(self, *frames: bytes) -> None:
        with self._sending:
            self._socket.sendall(b"".join(frames))

    def go_away(self) -> None:
        """Tell the other end to begin no more calls."""
        try:
            self._send(_frame(_GO_AWAY, 0, 0, _MOST_WINDOW.to_bytes(4) + bytes(4)))
        except OSError as error:
            log.debug("%s", error)

    def close(self) -> None:
        """Have run() end, and all who wait for room."""
        with self._room:
            self._is_open = False
            for each in self._streams.values():
                each.is_wanted = False
            self._room.notify_all()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("%s", error)


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & _PADDED:
        return payload
    return payload[1 : len(payload) - payload[0]]
