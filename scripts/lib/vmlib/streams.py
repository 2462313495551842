"""Carry bytes between the guest's ports and our own streams, as they come."""

import os
import select
import socket
from collections.abc import Iterable

# A pipe that polls writable takes this much without blocking (POSIX PIPE_BUF).
_CHUNK_BYTES = 4096
_HANGUP = select.POLLHUP | select.POLLERR | select.POLLNVAL


class Flow:
    """One direction of one stream: at most one chunk is held at a time."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink = source, sink
        self.finished = False
        self._pending = b""

    def interest(self) -> tuple[int, int]:
        """The descriptor to wait for, and what on it."""
        if self._pending:
            return self.sink, select.POLLOUT
        return self.source, select.POLLIN

    def step(self) -> None:
        """Move what can be moved without blocking; called when poll says so."""
        if self._pending:
            sent = os.write(self.sink, self._pending[:_CHUNK_BYTES])
            self._pending = self._pending[sent:]
        else:
            data = os.read(self.source, 65536)
            self._pending = self.received(data) if data else b""
            self.finished = self.finished or not data

    def received(self, data: bytes) -> bytes:
        """What of `data` goes on to the sink."""
        return data

    @property
    def done(self) -> bool:
        return self.finished and not self._pending


class FromGuest(Flow):
    """Ends at the end mark, not when the source closes."""

    def __init__(self, source: int, sink: int, end_mark: bytes) -> None:
        super().__init__(source, sink)
        self._end_mark = end_mark
        self._held = b""  # may be the beginning of the mark
        self.marked = False

    def received(self, data: bytes) -> bytes:
        data = self._held + data
        before, mark, _ = data.partition(self._end_mark)
        if mark:
            self.finished = self.marked = True
            self._held = b""
            return before
        for length in range(min(len(self._end_mark) - 1, len(data)), 0, -1):
            if data.endswith(self._end_mark[:length]):
                self._held = data[-length:]
                return data[:-length]
        self._held = b""
        return data


class ToGuest(Flow):
    """Our standard input; at its end the port is closed, which the guest sees."""

    def __init__(self, source: int, port: socket.socket) -> None:
        super().__init__(source, port.fileno())
        self._port = port
        self._shut = False

    def step(self) -> None:
        try:
            super().step()
        except (BrokenPipeError, ConnectionResetError):  # the guest is gone
            self.finished, self._pending = True, b""
        if self.done and not self._shut:
            self._shut = True
            self._port.shutdown(socket.SHUT_WR)


def poll_flows(
    flows: Iterable[Flow], others: Iterable[int], limit_s: float
) -> set[int]:
    """Wait for any flow or any of the descriptors `others`; step the flows.

    Returns those of `others` that are readable; at most `limit_s` seconds pass.
    """
    poller = select.poll()
    wanted: dict[int, int] = {}
    active = [(flow, *flow.interest()) for flow in flows if not flow.done]
    for _, fd, event in active:
        wanted[fd] = wanted.get(fd, 0) | event
    others = list(others)
    for fd in others:
        wanted[fd] = wanted.get(fd, 0) | select.POLLIN
    for fd, events in wanted.items():
        poller.register(fd, events)
    ready = dict(poller.poll(max(0.0, limit_s) * 1000))
    for flow, fd, event in active:
        if ready.get(fd, 0) & (event | _HANGUP):
            flow.step()
    return {fd for fd in others if ready.get(fd, 0)}
