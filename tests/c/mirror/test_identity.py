"""What a mirror knows its object by, where its server says little of that."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mirror_shell import mirror_shell
from support.scripted_server import response, scripted_server

pytestmark = pytest.mark.usefixtures("carrier")

SIZE = 8192
DATA = bytes(range(256)) * 16
DATE = "Sun, 09 Sep 2001 01:46:40 GMT"


@pytest.mark.parametrize(
    ("pinned", "said", "total", "failure"),
    [
        (f"modified {DATE}", "", str(SIZE), ""),
        (f"modified {DATE}", 'ETag: W/"1"', str(SIZE), ""),
        (f"modified {DATE}", f"Last-Modified: {DATE}", str(SIZE), ""),
        # A size that is not said, or a date that is another one, promises nothing.
        (f"modified {DATE}", "", "*", "changed"),
        (f"modified {DATE}", "Last-Modified: today", str(SIZE), "changed"),
        (f"modified {DATE}", 'ETag: "1"', str(SIZE), "changed"),
        # Where there is a strong one, no answer is without it.
        ('etag "1"', "", str(SIZE), "changed"),
        ('etag "1"', 'ETag: W/"1"', str(SIZE), "changed"),
    ],
)
def test_a_range_need_not_repeat_the_date(
    sanitized_build: Path,
    tmp_path: Path,
    pinned: str,
    said: str,
    total: str,
    failure: str,
) -> None:
    """RFC 9110, 15.3.7: not where If-Range has said it."""
    head = f"206 Partial Content\nContent-Range: bytes 0-4095/{total}\n{said}"
    with scripted_server(lambda _: response(head.rstrip(), DATA)) as server:
        keys = {"kind": "http", "url": server.url()}
        with mirror_shell(sanitized_build, tmp_path, keys, size=SIZE) as mirror:
            mirror.pin(pinned)
            answer = mirror.fetch(0, len(DATA))
    assert answer.failure == failure
    assert answer.data == (None if failure else DATA)
    assert f"\r\nIf-Range: {pinned.split(' ', 1)[1]}\r\n" in server.requests[0]


def test_a_date_that_was_not_sent_has_to_be_repeated(
    sanitized_build: Path, tmp_path: Path
) -> None:
    """Requests to stores of S3 have no If-Range."""
    head = f"206 Partial Content\nContent-Range: bytes 0-4095/{SIZE}"
    with scripted_server(lambda _: response(head, DATA)) as server:
        keys = {"kind": "s3", "bucket": "bucket", "key": "key", "anonymous": True}
        keys["endpoint"] = f"http://127.0.0.1:{server.port}"
        with mirror_shell(sanitized_build, tmp_path, keys, size=SIZE) as mirror:
            mirror.pin(f"modified {DATE}")
            assert mirror.fetch(0, len(DATA)).failure == "changed"
    assert "If-Range" not in server.requests[0]
