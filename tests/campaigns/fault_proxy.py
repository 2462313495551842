"""An HTTP proxy in front of one server, which spoils a chosen share of the answers, or
only delays them.

For tests and campaigns, it does what real servers do when they, or the network, fail.
It serves GET and HEAD without bodies, on loopback.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, Self, get_args

Fault = Literal[
    "error-503", "reset", "short", "wrong-length", "corrupt", "delay", "hang"
]
FAULTS: tuple[Fault, ...] = get_args(Fault)

_HEAD_BYTES = 64 << 10
_PIECE_BYTES = 16 << 10

#: Sends head and body, spoilt in its way; True: another request may follow.
_Way = Callable[[bytes, bytes], Awaitable[bool]]


@dataclass(frozen=True)
class Faults:
    """Which faults to inject. ``kind`` None means none."""

    kind: Fault | None = None
    share: float = 0.0  #: of the requests, 0 to 1
    delay_s: float = 5.0  #: of "delay", before the answer
    hang_s: float = 60.0  #: of "hang", in the midst of the answer


@dataclass
class ProxyCounts:
    """Counts of requests, bytes and injected faults so far."""

    requests: int = 0
    body_bytes: int = 0  #: sent
    injected: Counter[str] = field(default_factory=Counter)


class FaultProxy:
    """Context manager: ``with FaultProxy(("127.0.0.1", 8080)) as proxy``, and
    ``proxy.url("/object")``. ``proxy.faults`` may be changed at any time, for requests
    that come later.

    ``latency_s`` is added to each answer, as if the server were far away, and all
    share a link of ``rate`` bytes per second; 0: as many as there can be.
    """

    def __init__(
        self,
        upstream: tuple[str, int],
        *,
        faults: Faults | None = None,
        latency_s: float = 0.0,
        rate: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.faults = faults or Faults()
        self.latency_s, self.rate = latency_s, rate
        self._free_s = 0.0  # when the link is
        self.counts = ProxyCounts()
        self._upstream = upstream
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy")
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._stop: asyncio.Event | None = None

    @property
    def port(self) -> int:
        """The port on 127.0.0.1 on which the proxy listens."""
        port: int = self._socket.getsockname()[1]
        return port

    def url(self, path: str) -> str:
        """Return the URL of an object of the server behind the proxy."""
        return f"http://127.0.0.1:{self.port}{path}"

    def heal(self) -> None:
        """Inject no more faults. Those that have begun still go on."""
        self.faults = replace(self.faults, kind=None)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(RuntimeError):  # it has ended with an error
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join()
        self._socket.close()

    def _end(self) -> None:
        if self._stop:
            self._stop.set()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        clients: set[asyncio.Task[None]] = set()

        def accepted(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            task = asyncio.ensure_future(_Client(self, reader, writer).serve())
            clients.add(task)
            task.add_done_callback(clients.discard)

        # NB: duplicate the socket, as start_server() closes it, and port() needs it.
        server = await asyncio.start_server(
            accepted, sock=self._socket.dup(), limit=_HEAD_BYTES
        )
        await self._stop.wait()
        server.close()
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    def draw(self) -> Fault | None:
        """Choose the fault for the request that just came, and count it."""
        faults = self.faults
        self.counts.requests += 1
        if faults.kind is None or self._random.random() >= faults.share:
            return None
        self.counts.injected[faults.kind] += 1
        return faults.kind

    def begin(self) -> None:
        """Note that an answer begins. While it is sent, the link is never idle, also
        when this process is late."""
        self._free_s = max(self._free_s, time.monotonic())

    async def passing(self, length: int) -> None:
        """Wait until so many bytes have passed the link."""
        if self.rate:
            self._free_s += length / self.rate
            await asyncio.sleep(max(0.0, self._free_s - time.monotonic()))

    @property
    def upstream(self) -> tuple[str, int]:
        """Host and port of the server behind it."""
        return self._upstream


class _Client:
    """A client's connection, and the connection to the server for it."""

    def __init__(
        self,
        proxy: FaultProxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def serve(self) -> None:
        try:
            while await self._answer():
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client or the server has closed its connection
        finally:
            if self._server:
                self._server[1].close()
            self._writer.close()

    async def _answer(self) -> bool:
        """Answer a request. Return whether another one may follow on the connection."""
        request = await self._reader.readuntil(b"\r\n\r\n")
        fault = self._proxy.draw()
        if self._proxy.latency_s:
            await asyncio.sleep(self._proxy.latency_s)
        if fault == "delay":
            await asyncio.sleep(self._proxy.faults.delay_s)
        if fault == "error-503":
            await self._send(
                b"HTTP/1.1 503 Unavailable\r\nContent-Length: 5\r\n\r\nsorry"
            )
            return True
        head, length, reader = await self._ask(request)
        if fault is None:
            return await self._relay(head, length, reader)
        return await self._spoiler(fault)(head, await reader.readexactly(length))

    def _spoiler(self, fault: Fault | None) -> _Way:
        ways: dict[str, _Way] = {
            "reset": self._reset,
            "short": self._short,
            "wrong-length": self._wrong_length,
            "corrupt": self._corrupt,
            "hang": self._hang,
        }
        return ways.get(fault or "", self._whole)

    async def _ask(self, request: bytes) -> tuple[bytes, int, asyncio.StreamReader]:
        """Return the answer's head, the length of its body, and where that comes."""
        if not self._server:
            self._server = await asyncio.open_connection(
                *self._proxy.upstream, limit=_HEAD_BYTES
            )
        reader, writer = self._server
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(_header(head, b"content-length") or 0)
        if request.startswith(b"HEAD"):
            length = 0
        return head, length, reader

    async def _relay(
        self, head: bytes, length: int, reader: asyncio.StreamReader
    ) -> bool:
        """Send the answer as it comes."""
        self._proxy.begin()
        self._writer.write(head)
        while length:
            piece = await reader.readexactly(min(length, _PIECE_BYTES))
            await self._proxy.passing(len(piece))
            await self._send(piece)
            self._proxy.counts.body_bytes += len(piece)
            length -= len(piece)
        await self._writer.drain()
        return _goes_on(head)

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def _whole(self, head: bytes, body: bytes) -> bool:
        await self._send(head + body)
        self._proxy.counts.body_bytes += len(body)
        return _goes_on(head)

    async def _short(self, head: bytes, body: bytes) -> bool:
        await self._send(head + body[: len(body) // 2])
        return False

    async def _reset(self, head: bytes, body: bytes) -> bool:
        await self._send(head + body[: len(body) // 2])
        # With a linger time of zero, close() sends RST.
        self._writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        self._writer.transport.abort()
        return False

    async def _wrong_length(self, head: bytes, body: bytes) -> bool:
        """Send a valid response with fewer bytes than the request asked for."""
        less = body[: max(len(body) - 512, 0)]
        lines = []
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                line = b"Content-Length: %d" % len(less)
            lines.append(line)
        await self._send(b"\r\n".join(lines) + less)
        return True

    async def _corrupt(self, head: bytes, body: bytes) -> bool:
        spoiled = bytearray(body)
        if spoiled:
            spoiled[len(spoiled) // 3] ^= 0x10
        return await self._whole(head, bytes(spoiled))

    async def _hang(self, head: bytes, body: bytes) -> bool:
        await self._send(head + body[: len(body) // 2])
        await asyncio.sleep(self._proxy.faults.hang_s)
        return False


def _goes_on(head: bytes) -> bool:
    return b"close" not in (_header(head, b"connection") or b"").lower()


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None
