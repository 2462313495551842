"""Blobs of a real container registry, behind tokens."""

import base64
import json
import random
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from support.registry import IDENTITY_TOKEN, PASSWORD, USER, Registry, registry_fixture
from support.shells import MirrorShell
from support.waiting import wait_until
from support.web_servers import response, scripted_server

SIZE = 300_000
UNIT = 64 << 10
DATA = random.Random(2).randbytes(SIZE)
REPOSITORY = "some/image"
DIGEST = f"sha256:{'0' * 64}"

Shell = Callable[..., MirrorShell]

registry = registry_fixture()


@pytest.fixture(scope="module")
def digest(registry: Registry) -> str:
    return registry.push(REPOSITORY, DATA)


@pytest.fixture(autouse=True)
def as_usual(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BTRFS_UBLK_RUN_DIR", str(tmp_path))  # with other tests' tokens
    if "registry" in request.fixturenames:
        tokens = request.getfixturevalue("registry").tokens
        tokens.anonymous, tokens.expires_in_s, tokens.life_s = False, 300, 300
        tokens.requests.clear()


@pytest.fixture
def shell(sanitized_build: Path, tmp_path: Path) -> Shell:
    """shell(registry, digest, **keys)"""

    def make(
        host: str,
        digest: str,
        environment: Mapping[str, str] | None = None,
        **keys: object,
    ) -> MirrorShell:
        place: dict[str, object] = {"kind": "oci", "registry": host, "insecure": True}
        place |= {"repository": REPOSITORY, "digest": digest, **keys}
        variables = environment or {"HOME": str(tmp_path)}
        return MirrorShell(sanitized_build, place, size=SIZE, environment=variables)

    return make


def config(path: Path, content: object) -> str:
    path.touch(mode=0o600)
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def helper(directory: Path, script: str) -> dict[str, str]:
    """An environment in which docker-credential-tests runs that."""
    path = directory / "docker-credential-tests"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{directory}:/usr/bin:/bin", "HOME": str(directory)}


AUTH = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


@pytest.mark.parametrize("entry", [{"auth": AUTH}, {"identitytoken": IDENTITY_TOKEN}])
def test_gets_one_token_for_all(
    shell: Shell, registry: Registry, digest: str, tmp_path: Path, entry: object
) -> None:
    path = config(tmp_path / "config.json", {"auths": {registry.host: entry}})
    with shell(registry.host, digest, docker_config=path) as mirror:
        assert mirror.probe() == {"result": 0, "size": SIZE, "identity": None}
        mirror.check_all(DATA)
    assert len(registry.tokens.requests) == 1
    assert f"scope=repository%3A{REPOSITORY.replace('/', '%2F')}%3Apull" in (
        registry.tokens.requests[0]
    )


def test_a_helper_inherits_nothing(
    shell: Shell, registry: Registry, digest: str, tmp_path: Path
) -> None:
    environment = helper(
        tmp_path, f"ls -l /proc/$$/fd >{tmp_path}/open; cat >{tmp_path}/input; exit 1"
    )
    path = config(tmp_path / "config.json", {"credsStore": "tests"})
    keys = {"docker_config": path, "environment": environment}
    with shell(registry.host, digest, **keys) as mirror:
        assert mirror.fetch(0, UNIT).failure == "no_login"
    links = (tmp_path / "open").read_text().splitlines()[1:]
    # The shell's own: its script, and where it puts what ls says.
    own = (str(tmp_path / "docker-credential-tests"), str(tmp_path / "open"))
    found = [x for x in links if not x.endswith(own)]
    assert len(found) <= 3 and all("socket:" in x or "/dev/null" in x for x in found)
    assert (tmp_path / "input").read_text() == registry.host


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo s3cret; exit 3", "ended with status 3"),
        ("echo s3cret", "without a user and a secret"),
        ('echo \'{"Username": "s3cret"}\'', "without a user and a secret"),
        ("yes s3cret", "File too large"),
        ("echo credentials not found in native keychain; exit 1", "HTTP status 401"),
    ],
)
def test_says_what_is_wrong_with_a_helper(
    shell: Shell,
    registry: Registry,
    digest: str,
    tmp_path: Path,
    script: str,
    text: str,
) -> None:
    environment = helper(tmp_path, script)
    path = config(tmp_path / "config.json", {"credsStore": "tests"})
    keys = {"docker_config": path, "environment": environment}
    with shell(registry.host, digest, **keys) as mirror:
        answer = mirror.fetch(0, UNIT)
    assert answer.failure == ("denied" if "HTTP status" in text else "no_login")
    assert text in answer.text
    assert "s3cret" not in answer.text + answer.hint


def test_a_helper_that_hangs_keeps_nobody_beyond_its_deadline(
    shell: Shell, registry: Registry, digest: str, tmp_path: Path
) -> None:
    environment = helper(tmp_path, "sleep 77 & sleep 77")
    path = config(tmp_path / "config.json", {"credsStore": "tests"})
    keys = {"docker_config": path, "environment": environment}
    with shell(registry.host, digest, **keys) as mirror:
        answer = mirror.fetch(0, UNIT, timeout_ms=500)
        assert answer.result == -110
        # Its own deadline: a helper that takes its 10 s has another text.
        assert "credentials could not be had in time" in answer.text
        assert mirror.cancel(0, UNIT, after_ms=100).result == -125
    # All of the helper's group was killed, and is not waited for.
    wait_until(lambda: b"sleep\x0077\x00" not in command_lines())


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            yield path.read_bytes()


def test_renews_a_token_that_is_refused(
    shell: Shell, registry: Registry, digest: str
) -> None:
    registry.tokens.anonymous = True
    registry.tokens.life_s = 2  # though it says 300; in whole seconds: 1 at least
    start = time.monotonic()
    with shell(registry.host, digest) as mirror:

        def has_renewed_it_twice() -> bool:
            assert mirror.fetch(0, UNIT).data == DATA[:UNIT]
            return len(registry.tokens.requests) >= 4

        wait_until(has_renewed_it_twice)
    assert time.monotonic() - start > 3


def test_a_login_may_change_while_it_is_used(
    shell: Shell,
    registry: Registry,
    digest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token server has refused what the file had a moment before."""
    new = base64.b64encode(f"{USER}:new".encode()).decode()
    files = [{"auths": {registry.host: {"auth": auth}}} for auth in (AUTH, new)]
    path = config(tmp_path / "config.json", files[0])
    tokens, answer = registry.tokens, registry.tokens.answer
    monkeypatch.setattr(tokens, "passwords", ["new"])

    def change(query: str, login: str | None) -> dict[str, object] | None:
        config(Path(path), files[1])
        return answer(query, login)

    monkeypatch.setattr(tokens, "answer", change)
    with shell(registry.host, digest, docker_config=path) as mirror:
        assert mirror.fetch(0, UNIT).data == DATA[:UNIT]
    assert len(tokens.requests) == 2


@pytest.mark.parametrize("carrier", ["", "libcurl"])
def test_gives_the_token_to_the_registry_only(shell: Shell, carrier: str) -> None:
    """The store only gets to know who sends us."""
    head = f"206 P\nContent-Range: bytes 0-9/{SIZE}"
    tokens = response("200 OK", b'{"token": "t0ken"}')
    with (
        scripted_server(lambda _: response(head, DATA[:10])) as store,
        scripted_server(lambda _: tokens) as token_server,
    ):
        challenge = f'Bearer realm="{token_server.url("t")}",service="x y"'

        def answer(request: str) -> bytes:
            if "Bearer t0ken" not in request:
                return response(f"401 No\nWWW-Authenticate: {challenge}")
            return response(f"307 There\nLocation: {store.url('blob?signature=1')}")

        with scripted_server(answer) as home:
            environment = {"HOME": "/nonexistent", "BTRFS_UBLK_HTTP": carrier}
            keys = {"environment": environment}
            with shell(f"127.0.0.1:{home.port}", DIGEST, **keys) as mirror:
                assert mirror.fetch(0, 10).data == DATA[:10]
                assert mirror.fetch(0, 10).data == DATA[:10]
    assert "service=x%20y&scope=repository%3Asome%2Fimage%3Apull" in (
        token_server.requests[0]
    )
    assert len(token_server.requests) == 1
    assert len(store.requests) == 2
    assert "uthorization" not in "".join(store.requests)
    referer = f"Referer: {home.url('')}\r\n"
    assert [referer in x for x in store.requests] == [True, True]
    assert "Referer" not in "".join(home.requests + token_server.requests)


@pytest.mark.parametrize(
    ("challenge", "tokens", "text"),
    [
        ('Bearer realm="http://far.invalid/t"', "", "without TLS"),
        ('Bearer realm="file:///etc/passwd"', "", "no URL"),
        ("Bearer service=x", "", "is not valid"),
        ('Bearer realm="TOKENS', "", "is not valid"),
        ('Bearer realm="TOKENS"', "{}", "without a token"),
        ('Bearer realm="TOKENS"', '{"token": "a\\nb"}', "without a token"),
        ('Bearer realm="TOKENS"', "x" * 300_000, "more than was asked for"),
    ],
)
def test_token_servers_that_make_no_sense(
    shell: Shell, challenge: str, tokens: str, text: str
) -> None:
    with scripted_server(lambda _: response("200 OK", tokens.encode())) as server:
        said = challenge.replace("TOKENS", server.url("t"))
        refused = response(f"401 No\nWWW-Authenticate: {said}")
        with scripted_server(lambda _: refused) as home:
            with shell(f"127.0.0.1:{home.port}", DIGEST) as mirror:
                answer = mirror.fetch(0, 10)
                assert text in mirror.probe()["text"]
    assert text in answer.text
    assert answer.failure in ("denied", "wrong")


def _first_reads(request: str) -> bytes:
    """Answer as Harbor and the proxy of distribution do while they have not stored a
    blob themselves."""
    return response("200 OK\nContent-Type: application/octet-stream", DATA)


@pytest.mark.usefixtures("carrier")
def test_a_proxy_that_sends_all_of_a_blob_is_read(shell: Shell) -> None:
    with scripted_server(_first_reads) as server:
        with shell(f"127.0.0.1:{server.port}", DIGEST) as mirror:
            count = SIZE // UNIT
            for answers in (
                mirror.fetch_many(0, UNIT, count),
                [mirror.fetch(i * UNIT, UNIT) for i in range(count)],
            ):
                for i, answer in enumerate(answers):
                    assert answer.data == DATA[i * UNIT :][:UNIT]
            tail = SIZE - count * UNIT
            assert mirror.fetch(count * UNIT, tail).data == DATA[-tail:]
            assert mirror.fetch(4096, 1).data == DATA[4096:4097]
        assert len(server.requests) == 2 * count + 2  # each was asked for once
        server.script = lambda _: b"".join(
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                b"%x\r\n" % SIZE,
                DATA,
                b"\r\n0\r\n\r\n",
            )
        )
        with shell(f"127.0.0.1:{server.port}", DIGEST) as mirror:
            assert mirror.fetch(UNIT, UNIT).data == DATA[UNIT : 2 * UNIT]


@pytest.mark.usefixtures("carrier")
@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (response("200 OK", b"please log in"), "wrong"),
        (response("200 OK", DATA + b"x"), "wrong"),
        (response("200 OK\nContent-Encoding: gzip", DATA), "wrong"),
        (response("200 OK", DATA[: UNIT + 10], length=SIZE), "transient"),
    ],
)
def test_what_is_not_all_of_a_blob_is_not_read(
    shell: Shell, answer: bytes, failure: str
) -> None:
    with scripted_server(lambda _: answer) as server:
        with shell(f"127.0.0.1:{server.port}", DIGEST) as mirror:
            got = mirror.fetch(UNIT, UNIT)
    assert (got.failure, got.data) == (failure, None)
