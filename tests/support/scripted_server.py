"""Runs a server that answers with exactly the bytes that a test chooses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

#: Gets the head of a request, and returns an answer, as bytes or as pieces of them.
Script = Callable[[str], bytes | Iterable[bytes]]


@dataclass
class ScriptedServer:
    """A server; ``script`` may be changed at any time, ``requests`` lists all heads."""

    port: int
    script: Script
    requests: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"

    def url(self, path: str = "object") -> str:
        return f"http://{self.host}:{self.port}/{path}"


def response(head: str, body: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a response whose Content-Length is ``length``, or the body's size."""
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {head.splitlines()[0]}", *head.splitlines()[1:]]
    lines += [f"Content-Length: {size}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + body


def _answer(server: ScriptedServer, client: socket.socket) -> None:
    request = b""
    client.settimeout(10)
    with client, suppress(OSError):
        while b"\r\n\r\n" not in request:
            more = client.recv(65536)
            if not more:
                return
            request += more
        text = request.decode("latin-1")
        server.requests.append(text)
        answer = server.script(text)
        for piece in [answer] if isinstance(answer, bytes) else answer:
            client.sendall(piece)
        client.shutdown(socket.SHUT_WR)
        while client.recv(65536):  # otherwise unread data would cause a reset
            pass


@contextmanager
def scripted_server(
    script: Script, host: str = "127.0.0.1"
) -> Iterator[ScriptedServer]:
    """Run a server that gives one answer per connection."""
    with socket.create_server((host, 0), backlog=64) as listener:
        port = listener.getsockname()[1]
        server = ScriptedServer(port=port, script=script, host=host)
        threads: list[threading.Thread] = []

        def accept() -> None:
            with suppress(OSError):  # the listener was shut down
                while True:
                    client, _ = listener.accept()
                    thread = threading.Thread(target=_answer, args=(server, client))
                    thread.start()
                    threads.append(thread)

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield server
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join()
