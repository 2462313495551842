"""Maps of running servers: requests by hand, as of clients that are not ours."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from select import select
from typing import Any

import pytest
from support.devices import MAP_UNIT, MEMSET, map_description
from support.needs import Need, inapplicable
from support.processes import ServerProcess, assert_answers
from support.web_servers import response, scripted_server

from btrfs_ublk.base.capabilities import FUSE, ROOT
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.content import Addition
from btrfs_ublk.content.maps import LONG_TIMEOUT_S, MapClient
from btrfs_ublk.server import BlockServer, Description, LazySegment
from btrfs_ublk.units import KIB, MIB, TIB

#: As deep as jansson would take it (JSON_PARSER_MAX_DEPTH).
DEEP = b"[" * 2040 + b"]" * 2040
#: A longer line is parsed by another thread.
CONTROL_SHORT_BYTES = 4096


@pytest.fixture
def server(need: Need, tmp_path: Path) -> Iterator[ServerProcess]:
    need(ROOT, FUSE)
    with ServerProcess(
        map_description(tmp_path, cached=False), "--queues", "1", front_end="fuse"
    ) as it:
        it.wait_ready()
        yield it


def test_a_slow_request_keeps_nobody_waiting(
    server: ServerProcess, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    lines = [
        json.dumps({"request": "map-add", "sources": [source], "mappings": []})
        for source in (
            {"kind": "http", "url": "http://127.0.0.1:9/", "unit": MAP_UNIT},
            {"kind": "file", "path": str(fifo), "unit": MAP_UNIT},
        )
    ]
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        slow = lines[0].replace(":9/", f":{port}/").encode() + b"\n"
        # Nobody ever answers there: as many as there are places, and some that leave.
        for _ in range(10):
            with server.connect() as leaving:
                leaving.socket.sendall(slow)
        clients = [stack.enter_context(server.connect()) for _ in range(10)]
        for client in clients:
            client.socket.sendall(slow)
        time.sleep(0.5)
        assert_answers(server)
        with server.connect() as other:
            other.socket.sendall(lines[1].encode() + b"\n")
            assert "failed" in other.line()
        assert not select([client.socket for client in clients], [], [], 0)[0]
        listener.close()
    assert_answers(server)
    # And none of them keeps it from stopping.
    begin_s = time.monotonic()
    server.stop()
    assert time.monotonic() - begin_s < 30


@pytest.mark.parametrize(
    ("asks", "at_once"), [("size of each source", 16), ("mirrors of a source", 1)]
)
def test_asking_ends_with_the_client(
    server: ServerProcess, asks: str, at_once: int
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def answer(_: str) -> bytes:
        asked.set()
        assert go_on.wait(60)
        return response("206 Partial\nContent-Range: bytes 0-0/4096", b"x")

    with scripted_server(answer) as web:
        places = [{"kind": "http", "url": web.url(str(x))} for x in range(3 * at_once)]
        add = {"request": "map-add", "mappings": [[0, 4096, 0, 0]]}
        if asks == "size of each source":
            request = add | {"sources": places}
        else:
            source = {"mirrors": places, "size": 4096}
            with server.connect() as client:
                client.send(add | {"sources": [source]})
                assert "failed" not in client.line()
            request = {"request": "map-verify", "ask": True}
        with server.connect() as leaving:
            leaving.send(request)
            assert asked.wait(60)
        assert_answers(server)  # so it has seen that the other one is gone
        go_on.set()
        time.sleep(0.5)
        assert 1 <= len(web.requests) <= at_once


def test_verify_may_take_its_time() -> None:
    waits: list[float] = []

    def ask(name: str, keys: dict[str, Any], **options: Any) -> dict[str, Any]:
        waits.append(options["timeout_s"])
        return {"problems": [], "next": None}

    assert list(MapClient(ask).verify()) == []
    assert waits == [LONG_TIMEOUT_S]


def test_long_lines(server: ServerProcess) -> None:
    rows = [[8192 * number, 4096, 0, 0] for number in range(4096)]
    request = {"request": "map-add", "sources": [MEMSET], "mappings": rows}
    line = json.dumps(request).encode().ljust(1_000_000) + b"\n"
    with server.connect() as client:
        client.socket.sendall(line + b'{"request": "info"}\n')
        assert len(client.line()["map-add"]["added"]) == 4096
        assert client.line()["reply"] == "info"
        # What is long and wrong, or long and quick, or no request at all.
        padding = b" " * 10_000
        client.socket.sendall(
            padding + b"nonsense\n" + padding + b'{"request": "info"}\n'
        )
        assert client.line() == {"error": "not valid JSON"}
        assert client.line()["reply"] == "info"
        client.socket.sendall(padding + b'{"request": "bla"}\n')
        assert "unknown request" in client.line()["error"]
        more = request | {"mappings": [*rows, rows[0]]}
        client.socket.sendall(json.dumps(more).encode() + b"\n")
        assert "4097 mappings are too many" in client.line()["error"]
        client.socket.sendall(b"x" * (3 << 20) + b"\n")
        assert client.line() == {"error": "request too long"}
        assert client.request("stats")["reply"] == "stats"


def test_a_line_of_100_mb_takes_no_memory(server: ServerProcess) -> None:
    def resident_bytes() -> int:
        pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    with server.connect() as client:
        for _ in range(100):
            client.socket.sendall(b"x" * 1_000_000)
        client.socket.sendall(b"\n")
        assert client.line() == {"error": "request too long"}
        assert resident_bytes() - before < 4 * MIB
        assert client.request("stats")["reply"] == "stats"
    assert_answers(server)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"request": "map-add"}, "must be lists"),
        ({"request": "map-add", "sources": [], "mappings": 7}, "must be lists"),
        ({"request": "map-add", "sources": [], "mappings": [7]}, "four numbers"),
        (
            {"request": "map-add", "sources": [], "mappings": [[0, 1, 2]]},
            "four numbers",
        ),
        (
            {"request": "map-add", "sources": [], "mappings": [[None, None, None, 0]]},
            "four numbers",
        ),
        (
            {"request": "map-add", "sources": [], "mappings": [], "more": 1},
            'unknown key "more"',
        ),
        ({"request": "map-add", "in_file": True}, "no descriptor"),
        ({"request": "map-add", "in_file": 1}, "true or false"),
        (
            {"request": "map-add", "sources": [], "mappings": [], "room": 7},
            "must be an object",
        ),
        (
            {"request": "map-add", "sources": [], "mappings": [], "room": {"x": 1}},
            'unknown key "x"',
        ),
        ({"request": "map-list", "from": -1}, "negative"),
        ({"request": "map-list", "from": 5, "to": 4}, 'behind "to"'),
        ({"request": "map-list", "more": 1}, 'unknown key "more"'),
        ({"request": "map-stats", "map": 7}, "non-empty string"),
        ({"request": "map-verify", "ask": "yes"}, "true or false"),
        ({"request": "map-show", "offset": "x"}, "integer"),
    ],
)
def test_requests_that_make_no_sense(
    server: ServerProcess, keys: dict[str, Any], message: str
) -> None:
    with server.connect() as client:
        client.socket.sendall(json.dumps(keys).encode() + b"\n")
        reply = client.line()
        assert reply["failed"] == keys["request"] and message in reply["error"], reply
    assert_answers(server)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[0, 4096, 0, 0]\n{\n", "line 2 is neither"),
        (b"7\n", "line 1 is neither"),
        (b'{"kind": "memset", "x": ' + DEEP + b"}\n", "line 1 is neither"),
        (b"[0, 4096, 0]\n", "four numbers"),
        (b"[0, 4096, 0, 0]\n", "not among the 0"),
        (b'{"kind": "memset", "size": 4096, "byte": 1}\0\n', "not among|neither"),
    ],
)
def test_files_that_make_no_sense(
    server: ServerProcess, tmp_path: Path, text: bytes, message: str
) -> None:
    path = tmp_path / "batch"
    path.write_bytes(text + b"[0, 4096, 1, 0]\n")
    with server.connect() as client, path.open("r+b") as file:
        line = b'{"request": "map-add", "in_file": true}\n'
        socket.send_fds(client.socket, [line], [file.fileno()])
        reply = client.line()
        assert any(words in reply["error"] for words in message.split("|")), reply
        # Neither a pipe nor a device is read.
        for other in ("/dev/zero", "/proc/self/fd"):
            fd = os.open(other, os.O_RDONLY)
            socket.send_fds(client.socket, [line], [fd])
            os.close(fd)
            assert "no regular file" in client.line()["error"]
    assert_answers(server)


@pytest.mark.parametrize("more", [0, CONTROL_SHORT_BYTES])
def test_what_is_nested_deeply(server: ServerProcess, more: int) -> None:
    """A copy of it takes most of a thread's stack."""
    with server.connect() as client:
        for text in (DEEP, b'{"request": "map-list", "from": ' + DEEP + b"}"):
            client.socket.sendall(text + b" " * more + b"\n")
            assert "nested more than 64 deep" in client.line()["error"]
        # Brackets in a string are text.
        line = json.dumps({"request": "map-list", "from": '[{\\"' * 100})
        client.socket.sendall(line.encode() + b" " * more + b"\n")
        assert "must be an integer" in client.line()["error"]
    assert_answers(server)


def test_a_file_that_cannot_be_read(server: ServerProcess, tmp_path: Path) -> None:
    line = b'{"request": "map-add", "in_file": true}\n'
    with server.connect() as client, (tmp_path / "batch").open("wb") as file:
        counts = set()
        for _ in range(5):
            socket.send_fds(client.socket, [line], [file.fileno()])
            assert "cannot be read" in client.line()["error"]
            counts.add(len(os.listdir(f"/proc/{server.process.pid}/fd")))
        assert len(counts) == 1


def test_many_clients_add_at_the_same_time(server: ServerProcess) -> None:
    def add(base: int) -> None:
        with server.connect() as client:
            for number in range(50):
                row = [base + 8192 * number, 4096, 0, 0]
                request = {"request": "map-add", "sources": [MEMSET], "mappings": [row]}
                client.socket.sendall(json.dumps(request).encode() + b"\n")
                assert "reply" in client.line()

    threads = [
        threading.Thread(target=add, args=(number * 16 * MIB,)) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.request("map-stats")["map-stats"]["mappings"] == 400


def test_what_was_acknowledged_survives_a_kill(need: Need, tmp_path: Path) -> None:
    need(ROOT, FUSE)
    acknowledged: list[int] = []
    for turn in range(4):
        with ServerProcess(
            map_description(tmp_path, cached=False), "--queues", "1", front_end="fuse"
        ) as server:
            server.wait_ready()
            killing = threading.Timer(0.15, server.process.kill)
            with server.connect() as client:
                try:
                    for number in range(30_000):
                        at = (turn * 30_000 + number) * 8192
                        row = [at, 4096, 0, 0]
                        keys = {"sources": [MEMSET], "mappings": [row]}
                        line = json.dumps({"request": "map-add"} | keys).encode()
                        client.socket.sendall(line + b"\n")
                        assert "reply" in client.line()
                        acknowledged.append(at)
                        if number == 0:
                            killing.start()
                except (OSError, EOFError, ValueError):
                    pass
            server.process.wait(60)
    with ServerProcess(
        map_description(tmp_path, cached=False), "--queues", "1", front_end="fuse"
    ) as server:
        server.wait_ready()
        with server.connect() as client:
            found: set[int] = set()
            at: int | None = 0
            while at is not None:
                client.socket.sendall(
                    json.dumps({"request": "map-list", "from": at}).encode() + b"\n"
                )
                page = client.line()["map-list"]
                found |= {mapping["offset"] for mapping in page["mappings"]}
                at = page["next"]
    assert acknowledged and found.issuperset(acknowledged)
    assert len(found) - len(acknowledged) <= 4  # one each may have been on its way


def test_memory_with_100_000_mappings(need: Need, tmp_path: Path) -> None:
    """As it is by default, and with a cache of 1 TiB."""
    need(ROOT, FUSE)
    source, cache = tmp_path / "source", tmp_path / "cache"
    with source.open("wb") as file:
        file.truncate(TIB)
    length = 2 * TIB
    segment = LazySegment(
        offset=0, length=length, map=str(tmp_path / "it.map"), cache=str(cache)
    )
    whole = {"kind": "file", "path": str(source), "size": TIB}
    with BlockServer(Description(length, [segment]), front_end="fuse") as server:
        at = [Addition(offset=8192 * each, length=4096) for each in range(100_000)]
        assert len(server.map_add([MEMSET], at)) == 100_000
        server.map_add([whole], [Addition(offset=TIB, length=TIB)])
        assert read_direct(server.device, length - 4096, 4096) == bytes(4096)
        assert any(file.stat().st_size >= TIB for file in cache.rglob("*"))
        status = Path(f"/proc/{server.pid}/status").read_text()
    if os.environ.get("ASAN_OPTIONS"):
        inapplicable("a sanitizer's shadow memory counts as well")
    resident = [line for line in status.splitlines() if line.startswith("VmRSS")]
    assert int(resident[0].split()[1]) * KIB <= 64 * MIB


def test_words_of_the_answer(server: ServerProcess) -> None:
    """What is written to a file: offset, plus 1 where it existed, and length; then the
    sizes of sources."""
    fd = os.memfd_create("batch")
    with server.connect() as client, open(fd, "w+b") as file:
        text = json.dumps(MEMSET) + "\n[8192, 4096, 0, 0]\n[8192, 4096, 0, 0]\n"
        file.write(text.encode())
        file.flush()
        line = b'{"request": "map-add", "in_file": true}\n'
        socket.send_fds(client.socket, [line], [fd])
        answer = {"count": 2, "existed": 1, "sizes": True}
        assert client.line()["map-add"] == answer
        words = struct.unpack("<6Q", os.pread(fd, 48, 0))
        assert words == (8192, 4096, 8193, 4096, MEMSET["size"], MEMSET["size"])
