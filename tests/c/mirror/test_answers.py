"""Answers over HTTP that no real server gives, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mirror_shell import mirror_shell
from support.scripted_server import response, scripted_server

pytestmark = pytest.mark.usefixtures("carrier")

SIZE = 1 << 20
_RANGE = "206 Partial Content\nContent-Range: bytes 0-99/1048576"


@pytest.mark.parametrize(
    ("answer", "failure", "text"),
    [
        (response(_RANGE, b"x" * 101), "wrong", "announces 101 bytes"),
        (response(_RANGE, b"x" * 99), "wrong", "announces 99 bytes"),
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
            response("206 P\nContent-Range: bytes 0-99/50", b"x" * 100),
            "wrong",
            "invalid",
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
        (response("416 No\nContent-Range: bytes */50"), "changed", "ends before"),
        (response("204 Nothing"), "wrong", "status 204"),
        (response("302 Found"), "wrong", "without saying where"),
        (response("302 F\nLocation: http://u:p@localhost/"), "wrong", "has a user"),
        (response("412 Precondition"), "changed", "412"),
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
        (b"Good morning\r\n\r\n", "wrong", ""),
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
        with mirror_shell(sanitized_build, tmp_path, keys, size=SIZE) as mirror:
            got = mirror.fetch(0, 100)
    assert got.data is None
    assert failure in got.failure
    assert text in got.text


def test_takes_a_chunked_range_of_an_object_of_unknown_size(
    sanitized_build: Path, tmp_path: Path
) -> None:
    def answer(request: str) -> bytes:
        last = 0 if "bytes=0-0\r" in request else 9
        head = f"HTTP/1.1 206 P\r\nContent-Range: bytes 0-{last}/*"
        chunks = "1\r\n0\r\n" + ("9\r\n123456789\r\n" if last else "")
        return f"{head}\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n".encode()

    with scripted_server(answer) as server:
        keys = {"kind": "http", "url": server.url()}
        with mirror_shell(sanitized_build, tmp_path, keys, size=SIZE) as mirror:
            assert mirror.fetch(0, 10).data == b"0123456789"
            assert "does not say the object's size" in mirror.probe()["text"]
