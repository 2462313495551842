"""A far link to a server of this machine, where the kernel has no netem: a proxy that
delays and limits what passes it.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from btrfs_ublk.base.process import spawn

_CHUNK_BYTES, _CHUNKS = 16 << 10, 64


class _Way:
    """One way of the link, which all connections share."""

    def __init__(self, delay_s: float, bytes_per_s: float) -> None:
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s
        self._free_s = 0.0

    def arrival_s(self, count: int, now_s: float) -> float:
        """Return when so many bytes have arrived that are sent now."""
        self._free_s = max(self._free_s, now_s)
        if self._bytes_per_s:
            self._free_s += count / self._bytes_per_s
        return self._free_s + self._delay_s


async def _pass(
    way: _Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, late_s: float
) -> None:
    """Bring what one side says to the other; the first of it ``late_s`` later."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS)

    async def deliver() -> None:
        while True:
            at_s, data = await under_way.get()
            await asyncio.sleep(max(0.0, at_s - loop.time()))
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(deliver())
        data = b"?"
        while data:
            data = await reader.read(_CHUNK_BYTES)
            at_s = way.arrival_s(len(data), loop.time()) + late_s
            await under_way.put((at_s, data))
            late_s = 0.0


async def _serve(fd: int, port: int, round_trip_s: float, bytes_per_s: float) -> None:
    there, back = (_Way(round_trip_s / 2, bytes_per_s) for _ in range(2))

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far = await asyncio.open_connection("127.0.0.1", port)
            # The round trip that connecting takes.
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pass(there, reader, far[1], round_trip_s))
                tasks.create_task(_pass(back, far[0], writer, 0.0))
        except* OSError:
            writer.close()  # as one side did

    server = await asyncio.start_server(join, sock=socket.socket(fileno=fd))
    async with server:
        await server.serve_forever()


@contextmanager
def far_link(
    port: int, *, round_trip_ms: int, mbit: int = 0
) -> Iterator[tuple[str, int]]:
    """Yield host and port of a proxy to this one of 127.0.0.1. ``mbit``: 0: no limit.
    Connecting takes a round trip more, and there is no slow start.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        fd = listener.fileno()
        numbers = (fd, port, round_trip_ms / 1e3, mbit * 125e3)
        argv = [sys.executable, "-m", __name__, *(str(each) for each in numbers)]
        with spawn(argv, keep_open_fds=[fd]):
            yield listener.getsockname()


if __name__ == "__main__":
    _fd, _port, *_rest = sys.argv[1:]
    asyncio.run(_serve(int(_fd), int(_port), *(float(each) for each in _rest)))
