"""A registry's token, which all fetch processes of a host share."""

import json
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.registry import Registry, registry_fixture
from support.shells import FetchShell
from support.web_servers import response, scripted_server

from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.connection import Connection

UNIT = 64 << 10
DATA = bytes(range(256)) * (UNIT // 256)
SHELLS = 3

registry = registry_fixture()


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BTRFS_UBLK_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))


@contextmanager
def shells(
    build: Path, source: dict[str, object], count: int = SHELLS
) -> Iterator[list[FetchShell]]:
    """As many servers, each with two sources that are the same blob."""
    with ExitStack() as stack:
        started = [stack.enter_context(FetchShell(build)) for _ in range(count)]
        for shell in started:
            shell.add(source)
            shell.add({**source, "unit": UNIT // 2})
        yield started


def read_at_once(started: list[FetchShell], *, deadline_s: float) -> list[int]:
    for shell in started:
        for source in range(2):
            shell.begin(source, 0, UNIT, deadline_s=deadline_s)
    return [x.result for shell in started for x in shell.finish().values()]


def blob(host: str, digest: str) -> dict[str, object]:
    keys = {"kind": "oci", "registry": host, "repository": "it", "digest": digest}
    return {**keys, "insecure": True, "size": UNIT, "unit": UNIT}


def test_one_asks_for_all(
    registry: Registry, sanitized_build: Path, tmp_path: Path
) -> None:
    digest = registry.push("it", DATA)
    tokens = registry.tokens
    tokens.anonymous = True
    tokens.requests.clear()
    source = blob(registry.host, digest)
    for _ in range(2):  # what begins later finds it
        with shells(sanitized_build, source) as started:
            assert read_at_once(started, deadline_s=30) == [0] * 2 * SHELLS
    assert len(tokens.requests) == 1
    (record,) = (tmp_path / "tokens").iterdir()
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700

    # Commands have the same.
    access = RegistryAccess(insecure=True)

    def head() -> int:
        with Connection(registry.host, "it", access) as connection:
            path = f"it/blobs/{digest}"
            return connection.request("HEAD", path, what="", ok=(200,)).status_code

    with ThreadPoolExecutor(20) as pool:
        assert {x.result() for x in [pool.submit(head) for _ in range(50)]} == {200}
    assert len(tokens.requests) == 1

    # What is of no use any more is asked for once.
    record.write_text(json.dumps(json.loads(record.read_text()) | {"token": "bad"}))
    with shells(sanitized_build, source) as started:
        assert read_at_once(started, deadline_s=30) == [0] * 2 * SHELLS
    assert len(tokens.requests) == 2
    record.write_text(json.dumps(json.loads(record.read_text()) | {"token": "bad"}))
    assert head() == 200
    assert len(tokens.requests) == 3

    # Somebody else's is not taken.
    login = {"auths": {registry.host: {"username": "puller", "password": "p4ssw0rd"}}}
    path = tmp_path / "config.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(login))
    with shells(sanitized_build, {**source, "docker_config": str(path)}) as started:
        assert read_at_once(started, deadline_s=30) == [0] * 2 * SHELLS
    assert len(tokens.requests) == 4
    # The same with a client certificate is somebody else.
    certificate = tmp_path / "certificate"
    certificate.touch(mode=0o600)
    certificate.write_text("PEM")
    source = {**source, "client_cert": str(certificate)}
    with shells(sanitized_build, source) as started:
        assert read_at_once(started, deadline_s=30) == [0] * 2 * SHELLS
    assert len(tokens.requests) == 5


@pytest.mark.parametrize(
    "harm",
    [
        '{"token": 7, "until_ns": "x"}',
        # Seconds from now: of one that asks, and of a clock of before a boot.
        *('{"asking_ns": 1}', '{"failed_ns": 1e6}'),
    ],
)
def test_a_record_that_makes_no_sense(
    registry: Registry, sanitized_build: Path, tmp_path: Path, harm: str
) -> None:
    """As of a process that was killed while it wrote, or asked."""
    registry.tokens.anonymous = True
    source = blob(registry.host, registry.push("it", DATA))
    if "_ns" in harm and "token" not in harm:
        ((key, seconds),) = json.loads(harm).items()
        harm = json.dumps({key: time.monotonic_ns() + int(seconds * 1e9)})
    with shells(sanitized_build, source) as started:
        read_at_once(started[:1], deadline_s=30)
        (record,) = (tmp_path / "tokens").iterdir()
        record.write_text(harm)
        registry.tokens.requests.clear()
        assert read_at_once(started[1:], deadline_s=30) == [0] * 2 * (SHELLS - 1)
    assert len(registry.tokens.requests) == 1


@pytest.mark.parametrize(
    ("status", "least"), [("503 Service Unavailable", 2), ("401 Unauthorized", 1)]
)
def test_a_failing_token_server_is_asked_once_a_second(
    sanitized_build: Path, status: str, least: int
) -> None:
    with (
        scripted_server(lambda _: response(status)) as tokens,
        scripted_server(
            lambda _: response(
                f'401 U\nWWW-Authenticate: Bearer realm="{tokens.url()}",service="it"'
            )
        ) as server,
    ):
        host = server.url().split("/")[2]
        with shells(sanitized_build, blob(host, f"sha256:{'0' * 64}")) as started:
            begun_s = time.monotonic()
            assert 0 not in read_at_once(started, deadline_s=6)
            took_s = time.monotonic() - begun_s
        assert least <= len(tokens.requests) <= took_s + 2
