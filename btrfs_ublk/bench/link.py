"""A network link of a given round trip and rate, in front of a server of this machine:
a proxy that notes when requests begin, and how large their answers are.
"""

import asyncio
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from btrfs_ublk.base.process import spawn

#: What is read at once: at most this, or what the link takes in this time.
_READ_BYTES, _CHUNK_S = 64 << 10, 0.0013
#: How much of a connection may be under way; TCP grows to about this on such links.
_WINDOW_BYTES = 512 << 10
#: How far the link may be ahead of its rate, as timers are late.
_AHEAD_S = 0.001
_BEGINS = re.compile(rb"(?:GET|HEAD|POST|PUT|PATCH|DELETE) \S+ HTTP/1")


@dataclass
class Request:
    """When a request was sent (of time.monotonic()), and the bytes of its answer."""

    began_s: float
    bytes: int = 0


class _Flow:
    """A client's connection: what waits for the link, and what is on its way."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.opened_s = asyncio.get_running_loop().time()
        self.waiting: deque[bytes] = deque()
        self.under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self.queued_bytes = 0
        self.has_room = asyncio.Event()
        self.request: Request | None = None


class _Link:
    """The link. Connections take turns on their way to the client, chunk by chunk."""

    def __init__(
        self, server: tuple[str, int], round_trip_s: float, bytes_per_s: float
    ) -> None:
        self._server = server
        self._half_s, self._rate = round_trip_s / 2, bytes_per_s
        most = int(bytes_per_s * _CHUNK_S) or _READ_BYTES
        self._chunk_bytes = min(_READ_BYTES, most)
        self._connections: list[_Flow] = []
        self._more = asyncio.Event()
        self.requests: list[Request] = []

    async def run(self, pipe: Connection) -> None:
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        pipe.send(listener.sockets[0].getsockname()[1])

        def asked() -> None:
            pipe.recv()
            pipe.send([asdict(each) for each in self.requests])

        asyncio.get_running_loop().add_reader(pipe.fileno(), asked)
        await self._send()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connection = _Flow(writer)
        self._connections.append(connection)
        from_server, to_server = await asyncio.open_connection(*self._server)
        tasks = [
            asyncio.create_task(self._upwards(connection, reader, to_server)),
            asyncio.create_task(self._read(connection, from_server)),
            asyncio.create_task(self._deliver(connection)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self._connections.remove(connection)
            for each in (writer, to_server):
                each.close()

    async def _upwards(
        self,
        connection: _Flow,
        reader: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                now_s = loop.time()
                if _BEGINS.match(data):
                    connection.request = Request(now_s)
                    self.requests.append(connection.request)
                # NB: connecting takes a round trip, and here it took none.
                at_s = max(now_s, connection.opened_s + 2 * self._half_s)
                await asyncio.sleep(at_s + self._half_s - now_s)
                to_server.write(data)
                await to_server.drain()

    async def _read(self, connection: _Flow, from_server: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await from_server.read(self._chunk_bytes):
                connection.waiting.append(data)
                connection.queued_bytes += len(data)
                self._more.set()
                while connection.queued_bytes > _WINDOW_BYTES:
                    connection.has_room.clear()
                    await connection.has_room.wait()
            while connection.queued_bytes:  # the server has closed it
                connection.has_room.clear()
                await connection.has_room.wait()

    async def _send(self) -> None:
        """Give each connection its turn, and take the time that the link takes."""
        loop = asyncio.get_running_loop()
        free_s = loop.time()
        while True:
            waiting = [each for each in self._connections if each.waiting]
            if not waiting:
                self._more.clear()
                await self._more.wait()
                free_s = max(free_s, loop.time())
                continue
            for connection in waiting:
                data = connection.waiting.popleft()
                if self._rate:
                    free_s += len(data) / self._rate
                connection.under_way.put_nowait((free_s + self._half_s, data))
                # NB: what this process was late for, the link has sent meanwhile.
                if free_s > (now_s := loop.time()) + _AHEAD_S:
                    await asyncio.sleep(free_s - now_s)

    async def _deliver(self, connection: _Flow) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while True:
                at_s, data = await connection.under_way.get()
                if at_s > (now_s := loop.time()):
                    await asyncio.sleep(at_s - now_s)
                connection.writer.write(data)
                await connection.writer.drain()
                connection.queued_bytes -= len(data)
                connection.has_room.set()
                if connection.request is not None:
                    connection.request.bytes += len(data)


@contextmanager
def link(
    server: tuple[str, int], *, round_trip_s: float, bytes_per_s: float
) -> Iterator[tuple[str, Callable[[], list[Request]]]]:
    """Run the link, in a process of its own; yields its host and port, and what returns
    the requests until then. ``bytes_per_s``: 0 for no limit."""
    ours, its = Pipe()
    argv = [sys.executable, "-m", __name__, str(its.fileno()), *map(str, server)]
    argv += [str(round_trip_s), str(bytes_per_s)]
    with ours, its, spawn(argv, keep_open_fds=[its.fileno()]):

        def requests() -> list[Request]:
            ours.send(True)
            found: list[dict[str, Any]] = ours.recv()
            return [Request(**each) for each in found]

        yield f"127.0.0.1:{ours.recv()}", requests


def _main(fd: str, host: str, port: str, round_trip_s: str, rate: str) -> None:
    async def run() -> None:
        served = _Link((host, int(port)), float(round_trip_s), float(rate))
        await served.run(Connection(int(fd)))

    asyncio.run(run())


if __name__ == "__main__":
    _main(*sys.argv[1:])
