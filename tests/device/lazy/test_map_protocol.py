"""Maps of running servers: requests by hand, as of clients that are not ours."""

import json
import os
import socket
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

from btrfs_ublk.base.capabilities import FUSE, ROOT
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.content import Addition
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


#: Requests, and words of the refusal.
NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"request": "map-add"}, "must be lists"),
    ({"request": "map-add", "sources": [], "mappings": [7]}, "four numbers"),
    ({"request": "map-add", "sources": [], "mappings": [], "more": 1}, 'key "more"'),
    ({"request": "map-add", "in_file": True}, "no descriptor"),
    ({"request": "map-add", "in_file": 1}, "true or false"),
    ({"request": "map-add", "sources": [], "mappings": [], "room": 7}, "an object"),
    ({"request": "map-list", "from": -1}, "negative"),
    ({"request": "map-list", "from": 5, "to": 4}, 'behind "to"'),
    ({"request": "map-stats", "map": 7}, "non-empty string"),
    ({"request": "map-show", "offset": "x"}, "integer"),
]


def test_requests_that_make_no_sense(server: ServerProcess) -> None:
    with server.connect() as client:
        for keys, message in NONSENSE:
            client.socket.sendall(json.dumps(keys).encode() + b"\n")
            reply = client.line()
            assert reply["failed"] == keys["request"] and message in reply["error"]
    assert_answers(server)


def test_files_that_make_no_sense(server: ServerProcess, tmp_path: Path) -> None:
    line = b'{"request": "map-add", "in_file": true}\n'
    with server.connect() as client:
        for text, message in (
            (b"[0, 4096, 0, 0]\n{\n", "line 2 is neither"),
            (b'{"kind": "memset", "x": ' + DEEP + b"}\n", "line 1 is neither"),
            (b"[0, 4096, 0]\n", "four numbers"),
            (b"[0, 4096, 0, 0]\n", "not among the 0"),
        ):
            path = tmp_path / "batch"
            path.write_bytes(text + b"[0, 4096, 1, 0]\n")
            with path.open("r+b") as file:
                socket.send_fds(client.socket, [line], [file.fileno()])
                assert message in client.line()["error"]
        # Neither a pipe nor a device is read.
        for other in ("/dev/zero", "/proc/self/fd"):
            fd = os.open(other, os.O_RDONLY)
            socket.send_fds(client.socket, [line], [fd])
            os.close(fd)
            assert "no regular file" in client.line()["error"]
    assert_answers(server)


def test_what_is_nested_deeply(server: ServerProcess) -> None:
    """A copy of it takes most of a thread's stack."""
    line = json.dumps({"request": "map-list", "from": '[{\\"' * 100}).encode()
    with server.connect() as client:
        for more in (0, CONTROL_SHORT_BYTES):
            for text in (DEEP, b'{"request": "map-list", "from": ' + DEEP + b"}"):
                client.socket.sendall(text + b" " * more + b"\n")
                assert "nested more than 64 deep" in client.line()["error"]
            # Brackets in a string are text.
            client.socket.sendall(line + b" " * more + b"\n")
            assert "must be an integer" in client.line()["error"]
    assert_answers(server)


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
