"""Heads of HTTP/1.1 responses that are taken without libcurl: fuzz-head.c."""

import json
from pathlib import Path

import pytest
from support.sanitized_build import run_sanitized

#: The limit of http1_head.h.
MOST = 8192

STATUS = b"HTTP/1.1 206 Partial Content\r\n"
LENGTH = b"Content-Length: 4096\r\n"
END = b"\r\n"


def parse(build: Path, head: bytes) -> dict[str, int | bool]:
    done = run_sanitized(build / "csrc/tests/fuzz-head", given=head)
    parsed: dict[str, int | bool] = json.loads(done.stdout)
    return parsed


@pytest.mark.parametrize(
    ("head", "close"),
    [
        (STATUS + LENGTH + END, False),
        (b"HTTP/1.1 206 \r\n" + LENGTH + END, False),
        (STATUS + b"content-LENGTH:4096\r\n" + END, False),
        (STATUS + b"Content-Length: \t4096 \t\r\n" + END, False),
        (STATUS + LENGTH + b"Connection: close\r\n" + END, True),
        (STATUS + b"connection: Keep-Alive, CLOSE\r\n" + LENGTH + END, True),
        (STATUS + b"Connection: Upgrade, Keep-Alive\r\n" + LENGTH + END, False),
        (
            STATUS
            + b'X:\r\nETag: "\xe4\tb"\r\n!#$%&\'*+-.^_`|~9z: 1\r\n'
            + LENGTH
            + END,
            0,
        ),
        (STATUS + LENGTH + b"X: " + b"y" * (MOST - 59) + b"\r\n" + END, False),
    ],
)
def test_takes_plain_heads(sanitized_build: Path, head: bytes, close: bool) -> None:
    parsed = parse(sanitized_build, head + b"body")
    assert parsed == {
        "result": 1,
        "status": 206,
        "content_length": 4096,
        "length": len(head),
        "close": close,
    }


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.0 206 Partial Content\r\n" + LENGTH + END,
        b"HTTP/2 206 Partial Content\r\n" + LENGTH + END,
        b"HTTP/1.1  206 Partial Content\r\n" + LENGTH + END,
        b"HTTP/1.1 206\r\n" + LENGTH + END,
        b"HTTP/1.1 100 Continue\r\n" + LENGTH + END,
        b"HTTP/1.1 206 \0\r\n" + LENGTH + END,
        b"\r\n" + STATUS + LENGTH + END,
        STATUS + END,
        STATUS + LENGTH + LENGTH + END,
        STATUS + b"Content-Length: 4096, 4096\r\n" + END,
        STATUS + b"Content-Length: +4096\r\n" + END,
        STATUS + b"Content-Length:\r\n" + END,
        STATUS + b"Content-Length: 1000000000000000000\r\n" + END,
        STATUS + b"Content-Length : 4096\r\n" + END,
        STATUS + LENGTH + b"Transfer-Encoding: chunked\r\n" + END,
        STATUS + LENGTH + b"transfer-encoding: identity\r\n" + END,
        STATUS + LENGTH + b"Connection: close,\r\n" + END,
        STATUS + LENGTH + b"X: y\r\n z\r\n" + END,
        STATUS + LENGTH + b"no colon\r\n" + END,
        STATUS + LENGTH + b"X: y\n" + END,
        STATUS + LENGTH + b"X: y\rz\r\n" + END,
        STATUS + LENGTH + b"X: y\0z\r\n" + END,
        STATUS + LENGTH + b"\n",
        STATUS + LENGTH + b"X: " + b"y" * (MOST - 58) + b"\r\n" + END,
        STATUS + LENGTH + b"X" * MOST,
    ],
)
def test_leaves_all_others_to_libcurl(sanitized_build: Path, head: bytes) -> None:
    assert parse(sanitized_build, head)["result"] < 0


def test_waits_for_what_is_missing(sanitized_build: Path) -> None:
    head = STATUS + LENGTH + b"Connection: close\r\n" + END
    for part in (0, 1, 12, len(STATUS), len(STATUS + LENGTH) - 1, len(head) - 1):
        assert parse(sanitized_build, head[:part])["result"] == 0
