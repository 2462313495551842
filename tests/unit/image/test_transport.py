"""HTTP to registries: connections that are used again, proxies, and answers that end
too early."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.web_servers import response, scripted_server

from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.transport import Answer, NoAnswer, Session

TIMEOUT_S = (5.0, 5.0)


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session("tests")
    yield made
    made.close()


def get(session: Session, url: str) -> Answer:
    return session.send("GET", url, headers={}, timeout_s=TIMEOUT_S)


@contextmanager
def kept_connections(answer: bytes, each: int) -> Iterator[tuple[str, list[int]]]:
    """A server that closes connections after so many answers. Yields its URL, and how
    many requests each connection has brought."""
    counts: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                counts.append(0)
                with client:
                    while counts[-1] < each and client.recv(65536):
                        counts[-1] += 1
                        client.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x", counts
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    ],
)
def test_connections_are_used_again_until_they_end(
    session: Session, answer: bytes
) -> None:
    with kept_connections(answer, 2) as (url, counts):
        for _ in range(5):
            with get(session, url) as found:
                assert found.read(100) == b"hello"
    assert counts == [2, 2, 1]


def test_what_was_not_read_ends_its_connection(session: Session) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe"
    with kept_connections(answer, 2) as (url, counts):
        for _ in range(2):
            with get(session, url) as found:
                assert next(found.iter_content(2)) == b"he"
    assert counts == [1, 1]


def test_an_answer_that_ends_too_early(session: Session) -> None:
    with scripted_server(lambda _: response("200 OK", b"12345", length=9)) as server:
        with get(session, server.url("x")) as found:
            with pytest.raises(NoAnswer, match="4 bytes too early") as caught:
                found.read(100)
    assert caught.value.may_pass


@pytest.mark.parametrize(
    ("url", "may_pass"),
    [("http://127.0.0.1:1/", True), ("ftp://host/", False), ("http://a:b/", False)],
)
def test_no_answer(session: Session, url: str, may_pass: bool) -> None:
    with pytest.raises(NoAnswer) as caught:
        get(session, url)
    assert caught.value.may_pass == may_pass and str(caught.value)


@pytest.mark.parametrize(
    ("bypassed", "asked"),
    [
        ("", "GET http://registry.test:5000/v2/?a=%22b%22 HTTP/1.1"),
        ("10.0.0.0/8,registry.test", None),
    ],
)
def test_proxies_of_the_environment(
    session: Session, monkeypatch: pytest.MonkeyPatch, bypassed: str, asked: str | None
) -> None:
    with scripted_server(lambda _: response("200 OK", b"by it")) as proxy:
        monkeypatch.setenv("http_proxy", f"http://me:s%40crt@127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", bypassed)
        if asked is None:
            with pytest.raises(NoAnswer):
                get(session, "http://registry.test:5000/v2/")
            assert not proxy.requests
            monkeypatch.setenv("no_proxy", "127.0.0.0/8")
            with get(session, proxy.url("own")) as found:
                found.read(10)
            assert proxy.requests[0].startswith("GET /own HTTP/1.1")
            return
        with get(session, 'http://registry.test:5000/v2/?a="b"') as found:
            assert found.read(10) == b"by it"
    line, *headers = proxy.requests[0].splitlines()
    assert line == asked and "Host: registry.test:5000" in headers
    assert "Proxy-Authorization: Basic bWU6c0BjcnQ=" in headers


def test_an_early_answer_to_a_large_body_counts(session: Session) -> None:
    """A server that refuses an upload answers before it has all, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(1)
                client.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        body = (bytes(1 << 20) for _ in range(64))
        with session.send(
            "PUT", url, headers={}, body=body, timeout_s=TIMEOUT_S
        ) as answer:
            assert answer.status_code == 413


def test_certificates_that_are_missing(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/none/such.pem")
    with pytest.raises(UsageError, match="REQUESTS_CA_BUNDLE /none/such.pem: "):
        get(session, "https://127.0.0.1:1/")


def test_no_signature_is_told(session: Session) -> None:
    with pytest.raises(NoAnswer) as refused:
        get(session, "ftp://127.0.0.1/x?sig=s1gned")
    assert "s1gned" not in refused.value.reason


def test_pages(session: Session) -> None:
    links = '<https://a.test/1>; rel="first", </v2/x?n=2>; rel="next"'
    with scripted_server(lambda _: response(f"200 OK\nLink: {links}")) as server:
        with get(session, server.url("x")) as found:
            assert found.next_link == "/v2/x?n=2"
