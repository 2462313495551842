"""Attempts that hang, and who waits for them: fetch-shell, in a sanitizer build."""

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.fetchers import fetching
from support.shells import FetchShell
from support.waiting import wait_until
from support.web_servers import ScriptedServer, ranged, response, scripted_server

UNIT = 4096
UNITS = 256
#: A prefetch that hangs ends by itself only when its server is too slow, after 15 s.
PATIENT = "silent=600000"
DATA = b"".join(number.to_bytes(2, "little") * (UNIT // 2) for number in range(UNITS))


def right(request: str) -> bytes:
    return ranged(request, DATA, 'ETag: "1"')


@dataclass
class Origin:
    """Answers ranges of DATA: first `errors` times with 500; while `hangs` is set,
    only at the end.
    """

    errors: int = 0
    hangs: threading.Event = field(default_factory=threading.Event)
    end: threading.Event = field(default_factory=threading.Event)
    hanging: list[str] = field(default_factory=list)  #: without an answer until then

    def __call__(self, request: str) -> bytes:
        if self.hangs.is_set():
            self.hanging.append(request)
            self.end.wait()
        elif self.errors:
            self.errors -= 1
            return response("500 Internal Server Error")
        return right(request)


@contextmanager
def hanging_origin() -> Iterator[tuple[Origin, ScriptedServer]]:
    origin = Origin()
    with scripted_server(origin) as server:
        try:
            yield origin, server
        finally:
            origin.end.set()


def source(server: ScriptedServer) -> dict[str, Any]:
    keys = {"kind": "http", "url": server.url(), "proxy": "none"}
    return {"size": len(DATA), "unit": UNIT, **keys}


@contextmanager
def listening(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port, each connection to which is a thread's; these have ended afterwards."""
    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    threads.append(threading.Thread(target=talk, args=(client,)))
                    threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join()


def wait_for_requests(server: ScriptedServer, count: int) -> None:
    wait_until(lambda: len(server.requests) >= count)


def heal_after_prefetch(
    shell: FetchShell, origin: Origin, server: ScriptedServer, units: int
) -> int:
    """A source whose first units are being fetched by attempts that hang."""
    number = shell.add(source(server))
    assert shell.read(number, len(DATA) - UNIT, UNIT).data == DATA[-UNIT:]
    origin.hangs.set()
    shell.prefetch(number, 0, units * UNIT)
    wait_until(lambda: len(origin.hanging) == units)
    origin.hangs.clear()
    return number


@pytest.mark.parametrize(
    "deadline_s", [pytest.param(4, marks=pytest.mark.timing), 60, None]
)
def test_a_reader_does_not_inherit_a_hung_prefetch(
    sanitized_build: Path, tmp_path: Path, deadline_s: float | None
) -> None:
    with (
        hanging_origin() as (origin, server),
        FetchShell(sanitized_build, PATIENT, log=tmp_path / "log") as shell,
    ):
        number = heal_after_prefetch(shell, origin, server, 1)
        read = shell.read(number, 0, UNIT, deadline_s=deadline_s)
        assert read.data == DATA[:UNIT]
        assert len(server.requests) == 3  # the first one is of another unit
    assert "given up" in (tmp_path / "log").read_text()


def test_a_prefetch_that_hangs_ends_by_itself(
    sanitized_build: Path, tmp_path: Path
) -> None:
    with (
        hanging_origin() as (origin, server),
        FetchShell(sanitized_build, "run=1", log=tmp_path / "log") as shell,
    ):
        heal_after_prefetch(shell, origin, server, 2)
        assert shell.stats()["units_in_flight"] == 2
        wait_until(lambda: shell.stats()["units_in_flight"] == 0)


def test_a_deadline_when_half_of_it_came(sanitized_build: Path, tmp_path: Path) -> None:
    """The unit that came is gone from memory before the one that hangs is given up."""
    end = threading.Event()

    def script(request: str) -> bytes:
        if f"bytes=0-{UNIT - 1}" in request:
            end.wait()
        return right(request)

    options = (f"buffer={3 * UNIT}", "transfers=3")
    with fetching(sanitized_build, script, *options, log=tmp_path / "log") as (
        server,
        shell,
    ):
        try:
            number = shell.add(source(server))
            late = shell.begin(number, 0, 2 * UNIT, deadline_s=10)
            wait_for_requests(server, 2)
            good = [shell.begin(number, at * UNIT, UNIT) for at in range(8, 16)]
            answers = shell.finish()
        finally:
            end.set()
        assert answers[late].result == -errno.EIO
        assert all(answers[read].result == 0 for read in good)


@pytest.mark.parametrize(
    ("others", "deadline_s"), [pytest.param(0, 16, marks=pytest.mark.timing), (1, 60)]
)
def test_one_attempt_does_not_take_all_the_time(
    sanitized_build: Path, tmp_path: Path, others: int, deadline_s: float
) -> None:
    """The first request hangs; the next one, or one to another mirror, is answered."""
    with (
        hanging_origin() as (origin, server),
        scripted_server(right) as other,
        FetchShell(sanitized_build, log=tmp_path / "log") as shell,
    ):
        keys = {"kind": "http", "proxy": "none"}
        mirrors = [
            {**keys, "url": each.url()} for each in [server, other][: 1 + others]
        ]
        number = shell.add({"size": len(DATA), "unit": UNIT, "mirrors": mirrors})
        origin.hangs.set()
        read = shell.begin(number, 0, UNIT, deadline_s=deadline_s)
        wait_until(lambda: len(origin.hanging) == 1)
        origin.hangs.clear()
        assert shell.finish()[read].data == DATA[:UNIT]
        assert (len(server.requests), len(other.requests)) == (2 - others, others)


def test_a_retry_trusts_no_kept_connection(
    sanitized_build: Path, tmp_path: Path
) -> None:
    """All that are kept have gone dead without a word; new ones are good."""
    dead = threading.Event()
    end = threading.Event()
    kept: list[socket.socket] = []
    in_vain: list[socket.socket] = []

    def talk(client: socket.socket) -> None:
        with client, suppress(OSError):
            while request := client.recv(65536):
                if dead.is_set() and client in kept:
                    in_vain.append(client)
                    end.wait()
                    return
                kept.append(client)
                head, _, body = right(request.decode()).partition(b"\r\n\r\n")
                head = head.replace(b"Connection: close", b"Connection: keep-alive")
                client.sendall(head + b"\r\n\r\n" + body)

    with (
        listening(talk) as port,
        FetchShell(sanitized_build, log=tmp_path / "log") as shell,
    ):
        url = f"http://127.0.0.1:{port}/object"
        keys = {"kind": "http", "url": url, "proxy": "none"}
        number = shell.add({"size": len(DATA), "unit": UNIT, **keys})
        for at in range(0, 64):
            shell.begin(number, at * UNIT, UNIT)
        assert {read.result for read in shell.finish().values()} == {0}
        assert len(set(kept)) > 4  # at a time
        dead.set()
        try:
            # Its first attempt is a prefetch's, which ends long before the deadline.
            shell.prefetch(number, 100 * UNIT, UNIT)
            wait_until(lambda: in_vain)
            read = shell.read(number, 100 * UNIT, UNIT, deadline_s=60)
        finally:
            end.set()
        assert read.data == DATA[100 * UNIT : 101 * UNIT]
        assert len(in_vain) == 1


@pytest.mark.parametrize("after", ["86400", "9" * 40])
def test_a_busy_server_is_not_left_alone_for_long(
    sanitized_build: Path, after: str
) -> None:
    """Whatever it asks for: readers wait for it, and it may be well again."""

    def busy_once(head: str) -> bytes:
        if len(server.requests) == 1:
            return response(f"503 Service Unavailable\nRetry-After: {after}")
        return right(head)

    with scripted_server(busy_once) as server, FetchShell(sanitized_build) as shell:
        number = shell.add(source(server))
        assert shell.read(number, 0, UNIT, deadline_s=12).data == DATA[:UNIT]

    # At the end of input, all reads were failed in the order in which they had begun.
