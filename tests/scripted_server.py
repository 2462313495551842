"""A server that answers what a test tells it to, byte for byte, sense or no sense."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

#: Makes the bytes of an answer, or pieces of them, of the head of a request.
Script = Callable[[str], bytes | Iterable[bytes]]


@dataclass
class ScriptedServer:
    """``script`` may be changed at any time; ``requests`` has the heads so far."""

    port: int
    script: Script
    requests: list[str] = field(default_factory=list)

    def url(self, path: str = "object") -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


def response(head: str, body: bytes = b"", *, length: int | None = None) -> bytes:
    """With a Content-Length (that of the body, if none is given), as a whole."""
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
        while client.recv(65536):  # else what was not read would make it a reset
            pass


@contextmanager
def scripted_server(script: Script) -> Iterator[ScriptedServer]:
    """One connection, one answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        server = ScriptedServer(port=listener.getsockname()[1], script=script)
        threads: list[threading.Thread] = []

        def accept() -> None:
            with suppress(OSError):  # shut down: that is the end
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
