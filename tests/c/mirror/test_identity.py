"""What a mirror knows its object by, where its server says little of that."""

from pathlib import Path

import pytest
from support.shells import MirrorShell
from support.web_servers import response, scripted_server

pytestmark = pytest.mark.usefixtures("carrier")

SIZE = 8192
DATA = bytes(range(256)) * 16
DATE = "Sun, 09 Sep 2001 01:46:40 GMT"
LATER = "Sun, 09 Sep 2001 01:46:41 GMT"
RANGE = f"206 Partial Content\nContent-Range: bytes 0-{len(DATA) - 1}/{SIZE}"


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
        with MirrorShell(sanitized_build, keys, size=SIZE) as mirror:
            mirror.pin(pinned)
            answer = mirror.fetch(0, len(DATA))
    assert answer.failure == failure
    assert answer.data == (None if failure else DATA)
    assert f"\r\nIf-Range: {pinned.split(' ', 1)[1]}\r\n" in server.requests[0]


@pytest.mark.parametrize(
    ("pinned", "said", "failure", "if_range"),
    [
        # apache2's weak ones become strong after a second.
        (f'etag W/"1" modified {DATE}', f'ETag: "1"\nLast-Modified: {DATE}', "", ""),
        (
            f'etag W/"1" modified {DATE}',
            f'ETag: "1"\nLast-Modified: {LATER}',
            "changed",
            "",
        ),
        ('etag W/"1"', 'ETag: "1"', "changed", ""),
        # Those of express and http-server have milliseconds, which dates have not.
        (
            f'etag W/"1" modified {DATE}',
            f'ETag: W/"2"\nLast-Modified: {DATE}',
            "changed",
            "",
        ),
        ('etag W/"1"', 'ETag: W/"1"', "", ""),
        (
            f'etag W/"1" modified {DATE}',
            f'ETag: W/"1"\nLast-Modified: {LATER}',
            "changed",
            "",
        ),
        # nginx: `etag off` becomes `on`, and the other way round.
        (f"modified {DATE}", f'ETag: "1"\nLast-Modified: {DATE}', "", DATE),
        (f"modified {DATE}", f'ETag: W/"1"\nLast-Modified: {DATE}', "", DATE),
        (f'etag "1" modified {DATE}', f"Last-Modified: {DATE}", "", '"1"'),
        (f'etag "1" modified {DATE}', f"Last-Modified: {LATER}", "changed", '"1"'),
        # webrick's have no quotes, and as If-Range get 304.
        ("etag 1-2-3", "ETag: 1-2-3", "", ""),
        ("etag 1-2-3", "ETag: 1-2-4", "changed", ""),
        ('etag "1', 'ETag: "1"', "changed", ""),
        ('etag "1" "2"', 'ETag: "1" "2"', "", ""),
        # Replicas have the same object, and each has its own date.
        ('etag "1"', f'ETag: "1"\nLast-Modified: {DATE}', "", '"1"'),
        (f'etag "1" modified {DATE}', f'ETag: "1"\nLast-Modified: {LATER}', "", '"1"'),
        ('etag " modified "', 'ETag: " modified "', "", ""),
    ],
)
def test_compares_like_with_like(
    sanitized_build: Path,
    tmp_path: Path,
    pinned: str,
    said: str,
    failure: str,
    if_range: str,
) -> None:
    with scripted_server(lambda _: response(f"{RANGE}\n{said}", DATA)) as server:
        keys = {"kind": "http", "url": server.url()}
        with MirrorShell(sanitized_build, keys, size=SIZE) as mirror:
            mirror.pin(pinned)
            answer = mirror.fetch(0, len(DATA))
    assert (answer.failure, answer.data) == (failure, None if failure else DATA)
    sent = [x[10:] for x in server.requests[0].split("\r\n") if x[:10] == "If-Range: "]
    assert sent == [if_range] * bool(if_range)
