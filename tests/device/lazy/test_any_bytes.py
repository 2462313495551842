"""Text that is no UTF-8, of servers and file systems: it is told, and ends nothing."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.devices import MAP_UNIT, map_description
from support.web_servers import scripted_server

from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.content import Addition
from btrfs_ublk.content.refused import Refused
from btrfs_ublk.server import BlockServer
from btrfs_ublk.units import MIB

pytestmark = pytest.mark.fuse


@contextmanager
def serving(directory: Path) -> Iterator[BlockServer]:
    with BlockServer(map_description(directory), front_end="fuse", queues=1) as server:
        yield server


def refusal(server: BlockServer, source: dict[str, object]) -> str:
    """It is told why, and the server goes on."""
    with pytest.raises(Refused) as refused:
        server.map_add([source], [Addition()])
    assert server.stats().lazy
    return str(refused.value)


def test_any_headers(sanitized_helpers: None, tmp_path: Path) -> None:
    """Of an object that is read, as well: failures are in statistics and in the log."""
    draw = random.Random(13)

    def answer(_: str) -> bytes:
        words = [draw.randbytes(draw.randrange(1, 40)) for _ in range(3)]
        words = [word.translate(None, b"\r\n\0") for word in words]
        return (
            b"HTTP/1.1 206 OK\r\nContent-Range: bytes " + words[0] + b"\r\nETag: "
            b'"' + words[1] + b'"\r\nContent-Encoding: ' + words[2] + b"\r\n"
            b"Content-Length: 1\r\nConnection: close\r\n\r\nx"
        )

    with serving(tmp_path) as server, scripted_server(answer) as origin:
        for number in range(40):
            url = origin.url(f"object-{number}")
            refusal(server, {"kind": "http", "url": url, "unit": MAP_UNIT})
        source = {"kind": "http", "url": origin.url(), "unit": MAP_UNIT, "size": MIB}
        server.map_add([source], [Addition()])
        for offset in range(0, 8 * MAP_UNIT, MAP_UNIT):
            with pytest.raises(OSError):
                read_direct(server.device, offset, 4096)
        # Programs of other tests that open all block devices read this one, too.
        assert server.stats().lazy[0].fetcher.read_errors >= 8
        assert list(server.map().verify(ask_mirrors=True))


def test_an_identity(sanitized_helpers: None, tmp_path: Path) -> None:
    """An ETag may have any bytes beyond ASCII (RFC 9110, 8.8.3)."""
    tag = [b'"\xe9\xff-1"']

    def answer(head: str) -> bytes:
        first, last = head.lower().split("range: bytes=")[1].split("\r\n")[0].split("-")
        body = bytes(int(last) - int(first) + 1)
        return (
            f"HTTP/1.1 206 OK\r\nContent-Range: bytes {first}-{last}/{MIB}\r\n".encode()
            + b"ETag: "
            + tag[0]
            + f"\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )

    with scripted_server(answer) as origin:
        with serving(tmp_path) as server:
            source = {"kind": "http", "url": origin.url(), "unit": MAP_UNIT}
            server.map_add([source], [Addition()])
            assert read_direct(server.device, 0, 4096) == bytes(4096)
            tag[0] = b'"\xfe\xff-2"'
            (problem,) = server.map().verify(ask_mirrors=True)
            assert "has another object" in problem.text
        # Its own is known again after a restart.
        tag[0] = b'"\xe9\xff-1"'
        with serving(tmp_path) as server:
            assert read_direct(server.device, 4 * MAP_UNIT, 4096) == bytes(4096)


def test_paths_that_are_cut(sanitized_helpers: None, sparse_path: Path) -> None:
    """In mid-character: messages have 200 bytes of a path, statistics 511."""
    with serving(sparse_path) as server:
        missing = "/x" + "é" * 150
        said = refusal(server, {"kind": "file", "path": missing, "unit": MAP_UNIT})
        assert "éééé" in said
        place = sparse_path
        for _ in range(6):
            place = place / ("y" + "ü" * 120)
        place.mkdir(parents=True)
        content = os.urandom(MAP_UNIT)
        (place / "file").write_bytes(content)
        path = str(place / "file")
        (added,) = server.map_add(
            [{"kind": "file", "path": path, "unit": MAP_UNIT}], [Addition()]
        )
        assert read_direct(server.device, added.offset, MAP_UNIT) == content
        stats = server.stats()
        assert stats.lazy[0].fetcher.hosts
        (place / "file").write_bytes(bytes(MAP_UNIT + 1))
        server.stats()
