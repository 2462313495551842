"""The range server of btrfs_ublk.testing: RFC 9110, and that it survives nothing."""

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from btrfs_ublk.testing.range_server_fixtures import RangeServer

DATA = bytes(range(256)) * 4
Headers = dict[str, str]


@pytest.fixture(scope="module")
def server(btrfs_ublk_range_server_module: RangeServer) -> RangeServer:
    btrfs_ublk_range_server_module.put("data", DATA)
    return btrfs_ublk_range_server_module


@pytest.fixture
def connection(server: RangeServer) -> Iterator[http.client.HTTPConnection]:
    """One for all of a test's requests: it has to be kept."""
    host, _, port = server.base_url.removeprefix("http://").rstrip("/").partition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=20)) as made:
        yield made


def ask(
    connection: http.client.HTTPConnection,
    path: str = "/data",
    headers: Headers | None = None,
    *,
    method: str = "GET",
) -> tuple[int, Headers, bytes]:
    connection.request(method, path, headers=headers or {})
    with connection.getresponse() as answer:
        return answer.status, dict(answer.getheaders()), answer.read()


def test_all_and_parts(
    connection: http.client.HTTPConnection, server: RangeServer
) -> None:
    status, headers, body = ask(connection)
    assert (status, body, headers["Accept-Ranges"]) == (200, DATA, "bytes")
    status, headers, body = ask(connection, headers={"Range": "bytes=100-199"})
    assert (status, body) == (206, DATA[100:200])
    assert headers["Content-Range"] == "bytes 100-199/1024"
    status, headers, body = ask(connection, headers={"Range": "bytes=1024-"})
    assert (status, body, headers["Content-Range"]) == (416, b"", "bytes */1024")
    status, headers, body = ask(connection, method="HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", "1024")
    last = server.served()[-3:]
    assert [(x.method, x.status, x.first, x.length) for x in last] == [
        ("GET", 206, 100, 100),
        ("GET", 416, 0, 0),
        ("HEAD", 200, 0, 1024),
    ]


def test_a_replaced_file_is_another_one(
    connection: http.client.HTTPConnection, server: RangeServer
) -> None:
    """And If-Range says so: all of it comes."""
    server.put("new", b"old")
    old = ask(connection, "/new")[1]
    part: Headers = {"Range": "bytes=1-1"}
    for header in (old["ETag"], old["Last-Modified"]):
        status, _, body = ask(connection, "/new", part | {"If-Range": header})
        assert (status, body) == (206, b"l")
    assert ask(connection, "/new", {"If-None-Match": old["ETag"]})[0] == 304
    server.put("new", b"new")
    status, headers, body = ask(connection, "/new", part | {"If-Range": old["ETag"]})
    assert (status, body) == (200, b"new")
    assert headers["ETag"] != old["ETag"]
    assert ask(connection, "/new", {"If-None-Match": old["ETag"]})[0] == 200


def test_nothing_else_is_served(
    connection: http.client.HTTPConnection, server: RangeServer
) -> None:
    (server.directory / "out").symlink_to("/etc/hostname")
    for path in ("/", "/none", "/../log", "/%2e%2e/log", "/out", "//etc/hostname"):
        assert ask(connection, path)[0] == 404, path
    assert ask(connection)[0] == 200


def test_a_file_that_becomes_shorter_ends_the_connection(
    connection: http.client.HTTPConnection, server: RangeServer
) -> None:
    """Whatever came next would be taken for the rest of the file."""
    size = 64 << 20  # more than sockets hold
    with (server.directory / "shrinks").open("wb") as file:
        file.truncate(size)
    connection.request("GET", "/shrinks")
    with connection.getresponse() as answer:
        assert (answer.status, answer.read(4096)) == (200, bytes(4096))
        os.truncate(server.directory / "shrinks", 4096)
        with pytest.raises(http.client.IncompleteRead) as caught:
            answer.read()
    assert not caught.value.partial.strip(b"\0")


@pytest.mark.parametrize("how", ["TERM", "INT", "the end of its parent"])
def test_it_survives_nothing(how: str, tmp_path: Path) -> None:
    server = [sys.executable, "-m", "btrfs_ublk.testing.range_server", str(tmp_path)]
    # Where the shell dies, it is killed: it tells nobody.
    argv = (
        ["sh", "-c", '"$@" & wait', "sh", *server] if how.startswith("the") else server
    )
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"http://127.0.0.1:")
        if how.startswith("the"):
            process.kill()
        else:
            process.send_signal(signal.Signals[f"SIG{how}"])
        # All ends of the pipe are closed when the server has ended.
        assert process.stdout.read() == b""
        said = process.stderr.read().decode()
    assert said.strip() == "range_server: interrupted"
