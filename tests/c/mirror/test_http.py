"""Mirrors behind HTTP, mostly from a real server."""

import os
import random
import resource
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import tables
from support.needs import Need
from support.shells import MirrorShell
from support.web_servers import NGINX, WebServer, response, scripted_server, web_server

SIZE = 1 << 20
UNIT = 64 << 10
#: What libcurl trusts, as Debian builds it.
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
DATA = random.Random(1).randbytes(SIZE)

Shell = Callable[..., MirrorShell]


@pytest.fixture(scope="module")
def web(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[WebServer]:
    need: Need = request.getfixturevalue("need")
    need(NGINX)
    with web_server(tmp_path_factory.mktemp("web")) as server:
        (server.files / "object").write_bytes(DATA)
        yield server


@pytest.fixture
def shell(sanitized_build: Path, tmp_path: Path, carrier: str) -> Shell:
    """shell(url, **keys): a mirror of an object of SIZE bytes, by each carrier."""

    def make(
        url: str,
        size: int = SIZE,
        environment: Mapping[str, str] | None = None,
        **keys: object,
    ) -> MirrorShell:
        keys |= {"kind": "http", "url": url}
        return MirrorShell(sanitized_build, keys, size=size, environment=environment)

    return make


def secret(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_certificate_must_be_known(shell: Shell, web: WebServer) -> None:
    with shell(web.tls_url("files/object")) as mirror:
        answer = mirror.fetch(0, UNIT)
        assert (answer.failure, answer.data) == ("denied", None)
        assert "certificate" in answer.text
        assert mirror.probe()["result"] < 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_proxy_is_verified_by_certificates_that_are_read_already(
    sanitized_build: Path, web: WebServer, tmp_path: Path
) -> None:
    """libcurl would read the file for each connection, on the fetcher's thread."""
    (tmp_path / "known").write_bytes(web.ca.read_bytes())
    script = f'mount --bind {tmp_path / "known"} {CERTIFICATES}; exec "$@"'
    keys = {"kind": "http", "url": web.url("files/object"), "proxy": web.tls_url("")}
    with MirrorShell(sanitized_build, keys, size=SIZE) as mirror:
        assert "certificate" in mirror.fetch(0, UNIT).text
    prefix = ["unshare", "--mount", "sh", "-ec", script, "-"]
    with MirrorShell(sanitized_build, keys, size=SIZE, prefix=prefix) as mirror:
        assert mirror.fetch(0, UNIT).data == DATA[:UNIT]
        (tmp_path / "known").write_text("none")
        mirror.check_all(DATA)  # by more connections


def test_shows_its_own_certificate(shell: Shell, web: WebServer) -> None:
    url = web.tls_url("mutual/object")
    with shell(url, ca_file=str(web.ca)) as mirror:
        assert mirror.fetch(0, UNIT).failure == "denied"
    with shell(url, ca_file=str(web.ca), client_cert=str(web.client)) as mirror:
        assert mirror.fetch(0, UNIT).data == DATA[:UNIT]


def test_a_key_that_others_can_read_is_refused(
    shell: Shell, web: WebServer, tmp_path: Path
) -> None:
    key = tmp_path / "client.pem"
    key.write_bytes(web.client.read_bytes())
    key.chmod(0o640)
    url = web.tls_url("mutual/object")
    with shell(url, ca_file=str(web.ca), client_cert=str(key)) as mirror:
        answer = mirror.fetch(0, UNIT)
    assert answer.failure == "no_login"
    assert "open to others (mode 640)" in answer.text
    assert "chmod 600" in answer.hint


@pytest.mark.parametrize(
    ("path", "failure", "text"),
    [
        ("coded/object", "wrong", "in the coding 'gzip'"),
        ("files/missing", "gone", "HTTP status 404"),
        ("basic/object", "denied", "HTTP status 401"),
        ("broken", "transient", "HTTP status 500"),
        ("busy", "busy", "HTTP status 503"),
        ("limited", "busy", "HTTP status 429"),
        ("loop", "wrong", "too many redirects"),
        ("to-file", "wrong", "no http or https URL"),
    ],
)
def test_says_how_it_failed(
    shell: Shell, web: WebServer, path: str, failure: str, text: str
) -> None:
    with shell(web.url(path)) as mirror:
        answer = mirror.fetch(0, UNIT)
        assert (answer.failure, answer.data) == (failure, None)
        assert text in answer.text
        assert web.url(path) in answer.text
        assert text in mirror.probe()["text"]
    assert answer.retry_after_ms == {"busy": 7000, "limited": 3000}.get(path, 0)


@pytest.mark.parametrize("case", tables.cases("retry_after"), ids=tables.name)
def test_when_to_ask_again(shell: Shell, case: dict[str, Any]) -> None:
    """What says no time leaves it to the back-off (0)."""
    at_least_s, at_most_s = case["wait_s"] or (0, 0)
    busy = response(f"429 Too Many\nRetry-After: {tables.retry_after(case)}")
    with scripted_server(lambda _: busy) as server, shell(server.url()) as mirror:
        answer = mirror.fetch(0, UNIT)
    assert at_least_s * 1000 <= answer.retry_after_ms <= at_most_s * 1000


@pytest.mark.usefixtures("carrier")
@pytest.mark.parametrize(
    ("length", "text"),
    [(8 << 20, ""), ((8 << 20) + 1, "HTTP status 200"), (None, "HTTP status 200")],
)
def test_a_probe_takes_all_of_what_is_small(
    shell: Shell, length: int | None, text: str
) -> None:
    """A larger object is refused: each read would fetch all that lies before it."""
    said = "" if length is None else f"Content-Length: {length}\r\n"
    begun = f"HTTP/1.1 200 OK\r\nConnection: close\r\n{said}\r\n".encode() + DATA
    with scripted_server(lambda _: begun) as server, shell(server.url()) as mirror:
        answer = mirror.probe()
    assert (answer.get("size"), text in answer.get("text", "")) == (
        None if text else length,
        True,
    )


@pytest.mark.parametrize(
    ("head", "pinned", "failure"),
    [
        ("Content-Length: 1048576", None, ""),
        ('Content-Length: 1048576\r\nETag: "1"', "1", ""),
        ("Content-Length: 1048576", "1", "wrong"),  # of some page
        ('Content-Length: 1048576\r\nETag: "2"', "1", "changed"),
        ('ETag: "1"', "1", ""),
        ('ETag: "1"', None, "wrong"),
        ('Content-Length: 1048577\r\nETag: "1"', "1", "wrong"),
    ],
)
def test_all_of_what_may_be_something_else(
    shell: Shell, head: str, pinned: str | None, failure: str
) -> None:
    answer = f"HTTP/1.1 200 OK\r\nConnection: close\r\n{head}\r\n\r\n".encode() + DATA
    with scripted_server(lambda _: answer) as server, shell(server.url()) as mirror:
        if pinned:
            mirror.pin(f'etag "{pinned}"')
        got = mirror.fetch(UNIT, UNIT)
    assert (got.failure, got.data) == (failure, None if failure else DATA[UNIT:][:UNIT])
    # Without a length, libcurl asks again.
    assert len(server.requests) == 1 or "Length" not in head


def test_follows_redirects_but_not_out_of_tls(shell: Shell, web: WebServer) -> None:
    with shell(web.url("moved/object")) as mirror:
        assert mirror.fetch(UNIT, UNIT).data == DATA[UNIT : 2 * UNIT]
    with shell(web.url("to-tls/object"), ca_file=str(web.ca)) as mirror:
        assert mirror.fetch(UNIT, UNIT).data == DATA[UNIT : 2 * UNIT]
    # The system's certificates are read when the redirect has come.
    with shell(web.url("to-tls/object")) as mirror:
        for _ in range(2):
            answer = mirror.fetch(UNIT, UNIT)
            assert (answer.failure, answer.data) == ("denied", None)
            assert "certificate" in answer.text
    with shell(web.tls_url("to-plain/object"), ca_file=str(web.ca)) as mirror:
        answer = mirror.fetch(0, UNIT)
        assert answer.failure == "wrong"
        assert "from https to http" in answer.text


@pytest.mark.parametrize("case", tables.cases("redirects"), ids=tables.name)
def test_where_redirects_lead(shell: Shell, case: dict[str, Any]) -> None:
    head = f"206 Partial\nContent-Range: bytes 0-{UNIT - 1}/{SIZE}"
    answer = response(head, DATA[:UNIT])
    with scripted_server(tables.redirecting(case, answer)) as server:
        with shell(server.url("object")) as mirror:
            failure = mirror.fetch(0, UNIT).failure
    assert failure == ("" if case["followed"] else "wrong")
    assert tables.was_followed(server.requests) == case["followed"]


def test_the_password_is_read_when_it_is_needed(
    shell: Shell, web: WebServer, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    with shell(web.url("basic/object"), basic_auth_file=str(file)) as mirror:
        answer = mirror.fetch(0, UNIT)
        assert answer.failure == "no_login"
        assert f"cannot open '{file}'" in answer.text
        secret(file, "reader:wrong\n")
        assert mirror.fetch(0, UNIT).failure == "denied"
        secret(file, "reader:s3cret\n")  # at once, though it was read just now
        answers = mirror.fetch_many(0, UNIT, 8)
        assert [x.data for x in answers] == [DATA[i * UNIT :][:UNIT] for i in range(8)]


def test_credentials_go_to_nobody_else(shell: Shell, tmp_path: Path) -> None:
    def ok(request: str) -> bytes:
        head = f"206 Partial\nContent-Range: bytes 0-{UNIT - 1}/{SIZE}"
        return response(head, DATA[:UNIT])

    token = secret(tmp_path / "token", "t0ken\n")
    headers = secret(tmp_path / "headers", "# two\nX-Key: k3y\nX-Other: v4lue\n")
    with scripted_server(ok) as other:
        there = f"302 Found\nLocation: {other.url('there?sig=s1gned')}"
        with scripted_server(lambda _: response(there)) as home:
            url = home.url("object?q=qu3ry")
            keys = {"bearer_token_file": token, "headers_file": headers}
            with shell(url, **keys) as mirror:
                assert mirror.fetch(0, UNIT).data == DATA[:UNIT]
                other.script = lambda _: response("500 Oh")
                answer = mirror.fetch(0, UNIT)
    assert "Authorization: Bearer t0ken\r\n" in home.requests[0]
    assert "X-Key: k3y\r\n" in home.requests[0]
    for unwanted in ("t0ken", "k3y", "v4lue"):
        assert unwanted not in "".join(other.requests)
    said = answer.text + answer.hint
    assert f"{other.url('there')}: HTTP status 500" in said
    for hidden in ("s1gned", "qu3ry", "t0ken", "k3y"):
        assert hidden not in said


def test_a_new_token_is_tried_when_the_old_one_is_refused(
    shell: Shell, tmp_path: Path
) -> None:
    good = "one"

    def check(request: str) -> bytes:
        if f"Bearer {good}\r\n" not in request:
            return response("401 No", b"x" * 100)
        return response(f"206 Here\nContent-Range: bytes 0-9/{SIZE}", DATA[:10])

    file = tmp_path / "token"
    secret(file, "one")
    with scripted_server(check) as server:
        with shell(server.url(), bearer_token_file=str(file)) as mirror:
            assert mirror.fetch(0, 10).data == DATA[:10]
            good = "two"
            secret(file, "two")
            assert mirror.fetch(0, 10).data == DATA[:10]
            assert len(server.requests) == 3
            good = "three"
            assert mirror.fetch(0, 10).failure == "denied"


def test_a_signed_url_is_in_a_file(sanitized_build: Path, tmp_path: Path) -> None:
    """Which is read again when the signature is no good any more."""
    good = "s1gned"

    def check(request: str) -> bytes:
        if f"GET /object?sig={good} " not in request:
            return response("403 No")
        return response(f"206 Here\nContent-Range: bytes 0-9/{SIZE}", DATA[:10])

    file = tmp_path / "url"
    with scripted_server(check) as server:
        secret(file, f"{server.url('object?sig=s1gned')}\n")
        keys = {"kind": "http", "url_file": str(file)}
        with MirrorShell(sanitized_build, keys, size=SIZE) as mirror:
            assert mirror.fetch(0, 10).data == DATA[:10]
            good = "s3cond"
            refused = mirror.fetch(0, 10)
            assert refused.failure == "denied"
            assert f"{server.url('object')}: HTTP status 403" in refused.text
            assert "s1gned" not in refused.text + refused.hint
            secret(file, server.url("object?sig=s3cond"))
            assert mirror.fetch(0, 10).data == DATA[:10]
            secret(file, "no url: s3cret")
            good = "third"
            refused = mirror.fetch(0, 10)
            assert f'"{file}" is no URL with a scheme' in refused.text
            assert "s3cret" not in refused.text + refused.hint
    file.chmod(0o644)
    with MirrorShell(sanitized_build, keys, size=SIZE) as mirror:
        assert str(file) in mirror.probe()["text"]


def test_logs_in_to_a_proxy_of_the_environment(shell: Shell) -> None:
    with scripted_server(lambda _: response("500 Proxy")) as seen:
        proxy = f"http://user:p4ss@127.0.0.1:{seen.port}"
        environment = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": ""}
        for scheme in ("http", "https"):
            with shell(f"{scheme}://far.invalid/o", environment=environment) as mirror:
                assert "p4ss" not in mirror.fetch(0, 100).text
    assert [x.split()[0] for x in seen.requests] == ["GET", "CONNECT"]
    login = b64encode(b"user:p4ss").decode()
    for request in seen.requests:
        assert f"Proxy-Authorization: Basic {login}\r\n" in request


def test_a_process_with_credentials_leaves_no_core(
    shell: Shell, tmp_path: Path
) -> None:
    def limit(pid: int) -> int:
        return resource.prlimit(pid, resource.RLIMIT_CORE)[0]

    token = secret(tmp_path / "token", "t0ken\n")
    with shell("http://127.0.0.1:9/") as mirror:
        mirror.probe()
        assert limit(mirror.pid) == resource.getrlimit(resource.RLIMIT_CORE)[0]
    with shell("http://127.0.0.1:9/", bearer_token_file=token) as mirror:
        mirror.probe()
        assert limit(mirror.pid) in (0, 1)
        status = Path(f"/proc/{mirror.pid}/environ").stat()
        assert status.st_uid == 0
