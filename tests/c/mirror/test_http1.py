"""The client for plain HTTP/1.1: what it leaves to libcurl, and its connections."""

import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.shells import FetchShell, MirrorShell

pytestmark = pytest.mark.usefixtures("carrier")

SIZE = 1 << 20
DATA = random.Random(6).randbytes(SIZE)
#: As in csrc/fetch/transfer.h.
HOST_CONNECTIONS = 64
#: Of a URL, in a request that is not for libcurl (http1_request.c).
HTTP1_ROOM = (8 << 10) - 512

#: Gets a connection, its number from 0 on, and what it is about; returns to close it.
Serve = Callable[["Client"], None]
Shell = Callable[[str], MirrorShell]


@dataclass
class Client:
    """A connection of a client."""

    socket: socket.socket
    number: int
    requests: list[str]
    end: threading.Event

    def request(self) -> tuple[int, int] | None:
        """Wait for a request, and return its range; None: it was closed instead."""
        text = b""
        while b"\r\n\r\n" not in text:
            more = self.socket.recv(65536)
            if not more:
                return None
            text += more
        self.requests.append(text.decode("latin-1"))
        found = re.search(r"(?im)^range: bytes=(\d+)-(\d+)", self.requests[-1])
        assert found
        return int(found[1]), int(found[2])

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.socket.sendall(piece)

    def serve(self) -> None:
        """Answer all requests."""
        while found := self.request():
            self.send(plain(*found))


def plain(first: int, last: int, *more: str) -> bytes:
    return head(first, last, f"Content-Length: {last - first + 1}", *more) + (
        DATA[first : last + 1]
    )


def head(first: int, last: int, *more: str) -> bytes:
    lines = ["HTTP/1.1 206 P", f"Content-Range: bytes {first}-{last}/{SIZE}", *more]
    return "\r\n".join([*lines, 'ETag: "1"', "", ""]).encode()


@dataclass
class Server:
    port: int
    requests: list[str] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    end: threading.Event = field(default_factory=threading.Event)

    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/object"


@contextmanager
def server(serve: Serve) -> Iterator[Server]:
    """Run ``serve`` for each connection, in a thread."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        made = Server(port=listener.getsockname()[1])
        threads: list[threading.Thread] = []

        def one(client: Client) -> None:
            with client.socket, suppress(OSError):
                serve(client)

        def accept() -> None:
            with suppress(OSError):  # the listener was shut down
                while True:
                    accepted = listener.accept()[0]
                    accepted.settimeout(20)
                    number = len(made.clients)
                    client = Client(accepted, number, made.requests, made.end)
                    made.clients.append(client)
                    threads.append(threading.Thread(target=one, args=(client,)))
                    threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield made
        finally:
            made.end.set()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join()


@pytest.fixture
def shell(sanitized_build: Path, tmp_path: Path) -> Shell:
    def make(url: str) -> MirrorShell:
        keys = {"kind": "http", "url": url}
        return MirrorShell(sanitized_build, keys, size=SIZE)

    return make


def test_one_connection_for_all_requests(shell: Shell) -> None:
    with server(Client.serve) as origin, shell(origin.url()) as mirror:
        for first, length in ((0, 4096), (4096, 1), (0, SIZE), (12345, 70000)):
            assert mirror.fetch(first, length).data == DATA[first : first + length]
    assert len(origin.clients) == 1
    assert len(origin.requests) == 4
    assert origin.requests[1].splitlines()[:3] == [
        "GET /object HTTP/1.1",
        f"Host: 127.0.0.1:{origin.port}",
        "Range: bytes=4096-4096",
    ]


def chunked(first: int, last: int) -> bytes:
    data = DATA[first : last + 1]
    coded = f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n"
    return head(first, last, "Transfer-Encoding: chunked") + coded


def continued(first: int, last: int) -> bytes:
    return b"HTTP/1.1 100 Continue\r\n\r\n" + plain(first, last)


def folded(first: int, last: int) -> bytes:
    return plain(first, last, "X-Text: one", " two")


def bare(first: int, last: int) -> bytes:
    text, data = plain(first, last).split(b"\r\n\r\n", 1)
    return text.replace(b"\r\n", b"\n") + b"\n\n" + data


def twice(first: int, last: int) -> bytes:
    return plain(first, last, f"Content-Length: {last - first + 1}")


@pytest.mark.parametrize("answer", [chunked, continued, folded, bare, twice])
def test_libcurl_takes_over(
    shell: Shell, answer: Callable[[int, int], bytes], carrier: str
) -> None:
    """The first request is made again, and those after it by libcurl at once."""

    def serve(client: Client) -> None:
        while found := client.request():
            client.send(answer(*found))

    with server(serve) as origin, shell(origin.url()) as mirror:
        for first in (0, 100, 200):
            assert mirror.fetch(first, 100).data == DATA[first : first + 100]
    assert len(origin.requests) == {"http1": 4, "libcurl": 3}[carrier]


def test_other_bytes_on_a_kept_connection_are_no_response(
    shell: Shell, carrier: str
) -> None:
    """They came before the request. Our own client makes another connection; libcurl
    may take them for the response when it has not looked at the connection since:
    that attempt fails, and is made again by its caller.
    """
    sent = threading.Event()

    def serve(client: Client) -> None:
        if found := client.request():
            client.send(plain(*found))
            if not client.number:
                # With its end, so that libcurl does not wait for it.
                client.send(b"HTTP/1.1 500 Unasked\r\nContent-Length: 0\r\n\r\n")
                sent.set()
        client.serve()

    with server(serve) as origin, shell(origin.url()) as mirror:
        assert mirror.fetch(0, 20000).data == DATA[:20000]
        assert sent.wait(60)
        answer = mirror.fetch(100, 20000)
    if carrier == "libcurl" and answer.data is None:
        assert answer.failure == "transient"
    else:
        assert answer.data == DATA[100:20100]


def test_a_closed_connection_costs_no_attempt(shell: Shell) -> None:
    """The server has closed it while nobody looked."""
    closed = threading.Semaphore(0)

    def serve(client: Client) -> None:
        if found := client.request():
            client.send(plain(*found))
        client.socket.close()
        closed.release()

    with server(serve) as origin, shell(origin.url()) as mirror:
        for first in (0, 100, 200):
            assert mirror.fetch(first, 100).data == DATA[first : first + 100]
            assert closed.acquire(timeout=10)
    assert len(origin.requests) == len(origin.clients) == 3


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("reset", [False, True])
def test_a_response_that_is_cut(
    shell: Shell, share: float, reset: bool, carrier: str
) -> None:
    def serve(client: Client) -> None:
        if found := client.request():
            whole = plain(*found)
            client.send(whole[: int(len(whole) * share)])
        if reset:
            linger = b"\1\0\0\0\0\0\0\0"
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    with server(serve) as origin, shell(origin.url()) as mirror:
        answer = mirror.fetch(0, 300)
    # To libcurl, a part of a line is a head that makes no sense.
    assert answer.failure in ("transient", "wrong" if carrier == "libcurl" else "")
    assert answer.data is None
    assert len(origin.requests) == 1


def test_a_silent_server_is_given_up_at_the_deadline(shell: Shell) -> None:
    """By those that wait for a connection, too."""

    def serve(client: Client) -> None:
        client.request()
        client.end.wait(30)

    with server(serve) as origin, ExitStack() as stack:
        mirror = stack.enter_context(shell(origin.url()))
        answers = mirror.fetch_many(0, 100, HOST_CONNECTIONS + 10, timeout_ms=2000)
        origin.end.set()
    assert {(x.failure, x.result) for x in answers} == {("transient", -110)}


def test_requests_that_are_too_long_fail_nothing(
    sanitized_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the identity is known, it makes the request longer than ours may be. A
    reader's thread begins the second read, as a connection is kept."""
    monkeypatch.setenv("BTRFS_UBLK_FETCH", "in-process")
    with server(Client.serve) as origin, FetchShell(sanitized_build) as shell:
        url = f"{origin.url()}/{'x' * (HTTP1_ROOM - len(origin.url()) - 2)}"
        mirror = {"kind": "http", "url": url}
        source = shell.add({"size": SIZE, "unit": 4096, "mirrors": [mirror]})
        for unit in range(6):
            answer = shell.read(source, unit * 4096, 4096)
            assert answer.data == DATA[unit * 4096 :][:4096]
        assert shell.stats()["failures"]["transient"] == 0
