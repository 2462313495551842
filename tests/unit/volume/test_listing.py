"""What is listed elsewhere: the formats, and all that a hostile server may send."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.web_servers import ScriptedServer, response, scripted_server

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import MIB
from btrfs_ublk.volume import Listing, VolumeTree, listing, read_listing
from btrfs_ublk.volume.listing import parse_html, parse_json

PAGE = "https://h/a%20b/"
DATE, SECONDS = "Sun, 29 Nov 2026 19:25:00 GMT", 1795980300.0


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("d=s3://b/some/prefix/", {"kind": "s3", "bucket": "b", "key": "some/prefix/"}),
        ("d=s3://b/some prefix", {"kind": "s3", "bucket": "b", "key": "some prefix/"}),
        ("d=s3://b", {"kind": "s3", "bucket": "b", "key": ""}),
        ("d=http://h/d/#x", {"kind": "http", "url": "http://h/d/"}),
    ],
)
def test_a_tree_is_kept_by_a_definition(text: str, source: dict[str, str]) -> None:
    tree = VolumeTree.parse(text)
    assert tree.source == source
    assert VolumeTree.from_keys(tree.to_keys()) == tree


@pytest.mark.parametrize(
    "text",
    [
        *("d", "=x", "d=", "s3://b/=c", "../d=s3://b/", "d=s3://", "d=ftp://h/d/"),
        *("d=http:///d/", "d=https://h/d", "d=https://h/d/?q", "d=http://[/d/"),
        *("d=/tmp", "d=image.tar", "d=oci:x"),
    ],
)
def test_what_lists_no_tree(text: str) -> None:
    with pytest.raises(UsageError):
        VolumeTree.parse(text)


HTML = """<html><a href="../">up</a><a href="?C=N;O=D">by name</a><a href="#top">top</a>
<a href="/">top</a> <a href="https://other/a%20b/x">other</a> <a name="x">no link</a>
<a href="http://h/a%20b/x">no TLS</a> <a href="deep/er">two</a> <a href="//">x</a>
<a href="/a%20b/">self</a> <a href="http://[/">bad</a> <A HREF='caps&amp;%3C.x'>x</A>
<a href="/a%20b/full">x</a> <a href="https://h/a%20b/whole/">x</a>
<a href="./dot%20ted">x</a> <a href="raw ü">x</a> <a href="%FF">no UTF-8</a>
<a href="cut"""


def test_links_of_a_page() -> None:
    found = parse_html(HTML, PAGE)
    assert [(x.name, x.url.removeprefix(PAGE), x.is_directory) for x in found] == [
        ("caps&<.x", "caps&%3C.x", False),
        ("full", "full", False),
        ("whole", "whole/", True),
        ("dot ted", "dot%20ted", False),
        ("raw ü", "raw%20%C3%BC", False),
        ("\udcff", "%FF", False),
    ]


NGINX = {"name": "x?#", "type": "file", "mtime": DATE, "size": 4}
CADDY = {"name": "x?#", "size": 4, "mod_time": "2026-11-29T19:25:00Z", "is_dir": False}


@pytest.mark.parametrize("entry", [NGINX, CADDY])
def test_entries_in_json(entry: dict[str, Any]) -> None:
    directories = [{"name": "d", "type": "directory"}, {"name": "e/", "is_dir": True}]
    more = [
        *directories,
        {"name": "socket", "type": "other"},
        {"name": "n", "size": -1},
    ]
    one, *rest = parse_json(json.dumps([entry, *more]), PAGE)
    assert one == ("x?#", f"{PAGE}x%3F%23", False, {"size": 4}, SECONDS)
    found = [(x.name, x.url, x.is_directory, x.keys) for x in rest]
    assert found == [
        ("d", f"{PAGE}d/", True, {}),
        ("e", f"{PAGE}e/", True, {}),
        ("n", f"{PAGE}n", False, {}),
    ]


@pytest.mark.parametrize(
    "text",
    ["", "{}", "7", "[7]", '[{"name": 7}]', '[{"name": "\\ud800"}]', "[" * 99999],
)
def test_json_that_is_no_listing(text: str) -> None:
    with pytest.raises(BtrfsUblkError, match="JSON|which is no text"):
        list(parse_json(text, PAGE))


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        *((path, "no file can be named") for path in ("../x", "/x", "a//b", "a/.")),
        *((path, "no file can be named") for path in ("a\nb", "a\0b", "", "a/b a/")),
        ("ü" * 128, "more than 255 bytes"),
        ("a/" * 64 + "b", "more than 64 directories deep"),
        ("a/b a", "'a', which is a file, and a directory too"),
        ("1 2 3 4", "more than 3 files"),
    ],
)
def test_names_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, paths: str, why: str
) -> None:
    monkeypatch.setattr(listing, "_MAX_ENTRIES", 3)
    with pytest.raises(BtrfsUblkError, match=f"^s3://b/ lists .*{why}"):
        made = Listing("s3://b/")
        for path in paths.split(" "):
            made.add(path, {"size": 1})
        made.complete()


def test_one_name_with_two_contents() -> None:
    made = Listing("s3://b/")
    for _ in range(2):
        made.add("x", {"size": 1})
    with pytest.raises(BtrfsUblkError, match="'x', which is there twice"):
        made.add("x", {"size": 2})


def keys(url: str) -> dict[str, Any]:
    return {"kind": "http", "url": url}


# Of servers


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server(lambda head: b"") as found:
        yield found


def serve(server: ScriptedServer, **answers: bytes) -> None:
    """Answer by the last part of the path; ``index`` is that of all directories."""
    server.script = lambda head: answers[
        head.split(" ")[1].rpartition("/")[2].partition(".")[0] or "index"
    ]


def page(*hrefs: str) -> bytes:
    links = "".join(f'<a href="{href}">x</a>' for href in hrefs)
    return response("200 OK\nContent-Type: text/html", links.encode())


def refusal(server: ScriptedServer, source: dict[str, Any] | None = None) -> str:
    with pytest.raises(BtrfsUblkError) as caught:
        read_listing(source or keys(server.url("")))
    return str(caught.value)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (response("404 No"), "HTTP 404"),
        (response("302 Go\nLocation: http://127.0.0.2:1/"), "to http://127.0.0.2:1/"),
        (page(), "lists nothing"),
        (page("%2e%2e/"), "'..', which no file can be named"),
        (page("..%2f..%2fetc%2fpasswd"), "'../../etc/passwd', which no file"),
        (page("a%2fb"), "'a/b', which no file can be named"),
        (page("x", "x/"), "more than 64 directories deep"),
        (page("self/"), "more than 64 directories deep"),
        (response("200 OK\nContent-Type: application/json", b"{}"), "no listing"),
    ],
)
def test_indexes_that_are_refused(
    server: ScriptedServer, answer: bytes, why: str
) -> None:
    serve(server, index=answer, x=response("200 OK", b"x"))
    assert why in refusal(server)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (response("200 OK", b"x" * (8 * MIB + 1)), "a range with all of the file"),
        (response("403 No"), "HTTP 403"),
        (response("206 Part\nContent-Range: bytes 0-0/*", b"x"), "HTTP 206"),
    ],
)
def test_sizes_that_are_not_said(
    server: ScriptedServer, answer: bytes, why: str
) -> None:
    serve(server, index=page("x"), x=answer)
    assert f"{server.url('x')}: " in (told := refusal(server)) and why in told


def test_what_is_asked_of_a_file(server: ScriptedServer) -> None:
    part = f'206 Part\nContent-Range: bytes 0-0/9\nETag: W/"1"\nLast-Modified: {DATE}'
    serve(
        server,
        index=page("part", "empty", "whole"),
        part=response(part, b"x"),
        empty=response("416 No\nContent-Range: bytes */0"),
        whole=response("200 OK", b"whole"),
    )
    found = read_listing(keys(server.url("")) | {"unit": 4096}).files
    source = {"kind": "http", "url": server.url("part"), "unit": 4096, "size": 9}
    assert found["part"].source == source | {"identity": f'etag W/"1" modified {DATE}'}
    assert found["part"].mtime_s == SECONDS
    assert found["empty"].source == {"size": 0}
    assert found["whole"].source["size"] == 5


def test_the_login_of_a_server(server: ScriptedServer, tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.touch(mode=0o600)
    login.write_text("me:secret\n")
    with scripted_server(lambda head: response("200 OK", b"x")) as other:
        serve(
            server,
            index=page("x", "moved"),
            x=response("200 OK", b"x"),
            moved=response(f"302 Go\nLocation: {other.url('x')}"),
        )
        source = keys(server.url("")) | {"basic_auth_file": str(login)}
        found = read_listing(source).files
        assert all("Authorization: Basic" in x for x in server.requests)
        assert other.requests and not any("Authorization" in x for x in other.requests)
    assert found["x"].source["basic_auth_file"] == str(login)
    login.chmod(0o644)
    assert "is open to others" in refusal(server, source)
    assert "is no key" in refusal(server, source | {"headers_file": str(login)})


# Of an S3 store


TOKEN = "<NextContinuationToken>t</NextContinuationToken>"


def bucket(*objects: str, token: str = "") -> bytes:
    more = "true" if token else "false"
    body = (
        f"<ListBucketResult><IsTruncated>{more}</IsTruncated>{token}"
        f"<EncodingType>url</EncodingType>{''.join(objects)}</ListBucketResult>"
    )
    return response("200 OK\nContent-Type: application/xml", body.encode())


def item(key: str, size: int = 3, tag: str = "&quot;1&quot;") -> str:
    return (
        f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>{tag}</ETag>"
        "<LastModified>2026-11-29T19:25:00.000Z</LastModified></Contents>"
    )


def store(server: ScriptedServer) -> dict[str, Any]:
    return {
        "kind": "s3",
        "endpoint": server.url("").rstrip("/"),
        "bucket": "b",
        "key": "p q/",
        "anonymous": True,
    }


def test_pages_of_a_bucket(server: ScriptedServer) -> None:
    first = bucket(item("p+q/", 0), item("p+q/a%2Bb%3F"), token=TOKEN)
    second = bucket(item("p+q/d/", 0), item("p+q/e", 0), item("p+q/f/%C3%BC", tag="1"))
    server.script = lambda head: second if "continuation-token=t" in head else first
    found = read_listing(store(server))
    assert found.directories == {"d", "f"}
    assert {x.path: x.source for x in found.files.values()} == {
        name: store(server) | {"key": f"p q/{name}", "size": 3, "identity": 'etag "1"'}
        for name in ("a+b?", "f/ü")
    } | {"e": {"size": 0}}
    assert {x.mtime_s for x in found.files.values()} == {SECONDS}
    assert all("encoding-type=url" in x for x in server.requests)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (bucket(), "s3://b/p q/ lists nothing"),
        (bucket(item("p+q/%2E%2E/x")), "'../x', which no file can be named"),
        (bucket(item("p+q//x")), "'/x', which no file can be named"),
        (bucket(item("p+q/d/", 7)), "'d/', which no file can be named"),
        (bucket(item("p+q/d"), item("p+q/d/e")), "is a file, and a directory too"),
        (response("403 No", b"<Error><Code>AccessDenied</Code></Error>"), "HTTP 403"),
        (bucket(item("p+q/x"), token=TOKEN), "same"),
        (bucket("<Contents><Size>3</Size></Contents>"), "is no listing"),
        (bucket("<Contents><Key>p+q/x</Key></Contents>"), "an object without"),
        (bucket(item("p+q/x").replace("2026", "never")), "is no listing"),
        (bucket(item("p+q/x").replace("<Size>3", "<Size>x")), "is no listing"),
        (bucket(item("p+q/x").replace("<Size>3", "<Size>-3")), "an object without"),
        (bucket("<"), "cannot list it"),
    ],
)
def test_buckets_that_are_refused(
    server: ScriptedServer, answer: bytes, why: str
) -> None:
    server.script = lambda head: answer
    assert why in refusal(server, store(server))
