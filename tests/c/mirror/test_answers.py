"""Answers over HTTP that no real server gives, and what is said of them."""

from pathlib import Path

import pytest
from support.shells import MirrorShell
from support.web_servers import response, scripted_server

pytestmark = pytest.mark.usefixtures("carrier")

SIZE = 1 << 20
_RANGE = "206 Partial Content\nContent-Range: bytes 0-99/1048576"


@pytest.mark.parametrize(
    ("answer", "failure", "text"),
    [
        (response(_RANGE, b"x" * 101), "wrong", "announces 101 bytes"),
        (response(_RANGE, b"x" * 50, length=100), "transient", "50 bytes remaining"),
        (response("206 P", b"x" * 100), "wrong", "no Content-Range"),
        (
            response("206 P\nContent-Range: bytes 1-100/1048576", b"x" * 100),
            "wrong",
            "bytes 1 to 100 where 0 to 99",
        ),
        (
            response("206 P\nContent-Range: bytes 0-99/1048577", b"x" * 100),
            "changed",
            "has 1048577 bytes now",
        ),
        (
            response("206 P\nContent-Range: bytes 0-18446744073709551699/*", b"x"),
            "wrong",
            "invalid",
        ),
        (
            response(f"{_RANGE}\nContent-Range: bytes 5-99/1048576", b"x" * 100),
            "wrong",
            "invalid",
        ),
        (
            response(
                "206 P\nContent-Type: multipart/byteranges; boundary=x", b"x" * 100
            ),
            "wrong",
            "multipart",
        ),
        (response(f"{_RANGE}\nContent-Encoding: br", b"x" * 100), "wrong", "'br'"),
        # nginx, gzip_static: a file of its own, whole.
        (response("200 OK\nContent-Encoding: gzip", b"x" * 100), "wrong", "'gzip'"),
        (
            response("200 OK\nContent-Range: bytes 0-98/1048576", b"x" * 99),
            "wrong",
            "bytes 0 to 98 where 0 to 99",
        ),
        (response("200 OK"), "wrong", "is empty (0 bytes)"),
        (response("206 P\nContent-Range: bytes 0--1/0"), "changed", "is empty"),
        (response("416 No\nContent-Range: bytes */50"), "changed", "50 bytes now"),
        (response("302 Found"), "wrong", "without saying where"),
        (response("302 F\nLocation: http://u:p@localhost/"), "wrong", "has a user"),
        (
            b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-99/1048576\r\n\r\n",
            "transient",
            "",
        ),
        (
            b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-99/1048576\r\n\r\n" + b"x" * 200,
            "wrong",
            "more than was asked for",
        ),
        (b"", "transient", ""),
        (response(f"500 {'x' * 20000}", b"y" * 200000), "", ""),
        (response("200 OK", b"y" * 200000), "wrong", "HTTP status 200"),
    ],
)
def test_takes_nothing_but_what_it_asked_for(
    sanitized_build: Path, tmp_path: Path, answer: bytes, failure: str, text: str
) -> None:
    with scripted_server(lambda _: answer) as server:
        keys = {"kind": "http", "url": server.url()}
        with MirrorShell(sanitized_build, keys, size=SIZE) as mirror:
            got = mirror.fetch(0, 100)
    assert got.data is None
    assert failure in got.failure
    assert text in got.text


def test_a_range_may_have_the_status_of_everything(
    sanitized_build: Path, tmp_path: Path
) -> None:
    """As rclone 1.75 `serve s3` has it: the size is not that of the range."""
    data = b"0123456789"

    def answer(request: str) -> bytes:
        last = 0 if "bytes=0-0\r" in request else 9
        head = f'200 OK\nETag: "1"\nContent-Range: bytes 0-{last}/{SIZE}'
        return response(head, data[: last + 1])

    with scripted_server(answer) as server:
        keys = {"kind": "http", "url": server.url()}
        with MirrorShell(sanitized_build, keys, size=SIZE) as mirror:
            assert mirror.probe()["size"] == SIZE
            assert mirror.fetch(0, 10).data == data


@pytest.mark.parametrize("size", [1, 3000, 100_000])
def test_a_range_that_is_all_may_be_answered_with_all(
    sanitized_build: Path, tmp_path: Path, size: int
) -> None:
    """As merecat 2.32 does."""
    data = bytes(i % 251 for i in range(size))

    def answer(request: str) -> bytes:
        if f"bytes=0-{size - 1}\r" in request:
            return response('200 OK\nETag: "1"', data)
        return response(f'206 P\nETag: "1"\nContent-Range: bytes 0-0/{size}', data[:1])

    with scripted_server(answer) as server:
        keys = {"kind": "http", "url": server.url()}
        with MirrorShell(sanitized_build, keys, size=size) as mirror:
            assert mirror.probe()["size"] == size
            assert mirror.fetch(0, size).data == data
            mirror.pin('etag "2"')
            assert mirror.fetch(0, size).failure == "changed"
        with MirrorShell(sanitized_build, keys, size=size + 4096) as mirror:
            assert mirror.fetch(0, size).failure in ("wrong", "changed")


@pytest.mark.parametrize("size", [10, 60_000, 300_000])
@pytest.mark.parametrize("announced", [True, False])
def test_a_probe_may_get_everything(
    sanitized_build: Path, tmp_path: Path, size: int, announced: bool
) -> None:
    """busybox, sirv and s3rver take the end of `bytes=0-0` for none."""
    head = f'206 P\nETag: "1"\nContent-Range: bytes 0-{size - 1}/{size}'
    chunk = f"HTTP/1.1 {head}\r\nTransfer-Encoding: chunked\r\n\r\n{size:x}\r\n"
    chunked = [chunk.replace("\nE", "\r\nE").replace("\nC", "\r\nC").encode()]
    chunked += [bytes(size), b"\r\n0\r\n\r\n"]
    with scripted_server(
        lambda _: response(head, bytes(size)) if announced else chunked
    ) as server:
        keys = {"kind": "http", "url": server.url()}
        with MirrorShell(sanitized_build, keys, size=size) as mirror:
            probed = mirror.probe()
            assert probed == {"result": 0, "size": size, "identity": 'etag "1"'}
            # A read has what it asked for, and nothing more.
            assert mirror.fetch(0, 5).failure == "wrong"


#: How servers answer to `bytes=0-0` of an object without bytes.
_EMPTY = {
    "nginx": response("200 OK"),
    "caddy": response("416 No\nContent-Range: bytes */0"),
    "S3Mock": response("206 P\nContent-Range: bytes 0--1/0"),
    # It announces a byte, and sends none.
    "s3rver": response("206 P\nContent-Range: bytes 0-0/0", length=1),
    # So does this one, and does not say that there are none.
    "koa-range": b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-0/*\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "webfs": response("400 Bad Request", b"<html>"),
    "versitygw": response("416 No", b"<Error><Code>InvalidRange</Code></Error>"),
}


@pytest.mark.parametrize("server_name", _EMPTY)
def test_an_empty_object_has_no_bytes(
    sanitized_build: Path, tmp_path: Path, server_name: str
) -> None:
    def answer(request: str) -> bytes:
        return _EMPTY[server_name] if "Range: " in request else response("200 OK")

    with scripted_server(answer) as server:
        keys = {"kind": "http", "url": server.url()}
        with MirrorShell(sanitized_build, keys, size=SIZE) as mirror:
            assert mirror.probe() == {"result": 0, "size": 0, "identity": None}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("koa-range", "ends before all was sent"),
        ("webfs", "400"),
        ("versitygw", "ends before byte 1"),
    ],
)
@pytest.mark.parametrize(
    "all_of_it", [response("200 OK", b"x" * 400_000), response("403 No"), b""]
)
def test_a_range_that_is_refused_is_no_empty_object(
    sanitized_build: Path, tmp_path: Path, name: str, text: str, all_of_it: bytes
) -> None:
    refused = _EMPTY[name]
    with scripted_server(
        lambda request: refused if "Range: " in request else all_of_it
    ) as server:
        keys = {"kind": "http", "url": server.url()}
        with MirrorShell(sanitized_build, keys, size=SIZE) as mirror:
            said = mirror.probe()
    assert said["result"] < 0
    assert text in said["text"]
