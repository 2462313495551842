"""Credentials that cannot be read for a while: fetch-shell, in a sanitizer build."""

import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fetchers import fetching
from support.shells import FetchShell
from support.waiting import wait_until
from support.web_servers import ScriptedServer, ranged, response, scripted_server

UNIT = 4096
UNITS = 16
RELOAD_S = 5  # how long files are believed to be what they were
DATA = b"".join(bytes([number]) * UNIT for number in range(UNITS))


@pytest.fixture(autouse=True, params=["process", "in-process"])
def who_asks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fetch process, which has its credentials from here; or the fetcher itself."""
    monkeypatch.setenv("BTRFS_UBLK_FETCH", request.param)


class Guarded:
    """Serves units of DATA to those who come with `token`; None: to all."""

    def __init__(self, token: str | None) -> None:
        self.token = token

    def __call__(self, request: str) -> bytes:
        if self.token and f"Authorization: Bearer {self.token}\r\n" not in request:
            return response("401 Unauthorized")
        return ranged(request, DATA)


def with_token(server: ScriptedServer, file: Path) -> dict[str, Any]:
    keys = {"kind": "http", "url": server.url(), "bearer_token_file": str(file)}
    return {"size": len(DATA), "unit": UNIT, "proxy": "none", **keys}


def write_secret(path: Path, text: str) -> None:
    """As most programs do it: for a moment, it is empty."""
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


@contextmanager
def read_meanwhile(shell: FetchShell, source: int, unit: int) -> Iterator[None]:
    """A read that has no credentials, and comes to a good end once there are some."""
    number = shell.begin(source, unit * UNIT, UNIT, deadline_s=60)
    wait_until(lambda: shell.stats()["failures"]["no_login"])
    yield
    assert shell.finish()[number].data == DATA[unit * UNIT :][:UNIT]


def test_what_was_read_before_is_used(sanitized_build: Path, tmp_path: Path) -> None:
    """Until the server refuses it: then a read waits for what is new."""
    file = tmp_path / "token"
    write_secret(file, "0ne\n")
    guarded = Guarded("0ne")
    with fetching(sanitized_build, guarded, log=tmp_path / "log") as (server, shell):
        source = shell.add(with_token(server, file))
        assert shell.read(source, 0, UNIT).data == DATA[:UNIT]
        file.unlink()
        time.sleep(RELOAD_S + 0.2)
        assert shell.read(source, UNIT, UNIT).data == DATA[UNIT : 2 * UNIT]
        assert sum(shell.stats()["failures"].values()) == 0
        guarded.token = "tw0"
        with read_meanwhile(shell, source, 2):
            write_secret(file, "tw0\n")
    (kept,) = re.findall("event=login_kept .*", (tmp_path / "log").read_text())
    assert f"cannot open '{file}'" in kept


@pytest.mark.parametrize("before", [None, "", "two\x01words\n"])
def test_a_read_waits_for_credentials(
    sanitized_build: Path, tmp_path: Path, before: str | None
) -> None:
    file = tmp_path / "token"
    if before is not None:
        write_secret(file, before)
    with fetching(sanitized_build, Guarded("t0ken"), log=tmp_path / "log") as (
        server,
        shell,
    ):
        source = shell.add(with_token(server, file))
        with read_meanwhile(shell, source, 0):
            write_secret(file, "t0ken\n")
        stats = shell.stats()
    (host,) = stats["hosts"].values()
    assert host["failures"] == 0  # nobody has asked it
    assert "event=fetch_failed" in (tmp_path / "log").read_text()


def test_a_read_does_not_wait_for_ever(sanitized_build: Path, tmp_path: Path) -> None:
    with fetching(sanitized_build, Guarded("t0ken"), log=tmp_path / "log") as (
        server,
        shell,
    ):
        source = shell.add(with_token(server, tmp_path / "missing"))
        answer = shell.read(source, 0, UNIT, deadline_s=1)
        assert answer.result == -errno.EIO and answer.ms > 900
        # The program that adds it hears at once what is wrong from the start.
        probe = shell.ask({"probe": 1, "source": source})
        assert f"cannot open '{tmp_path / 'missing'}'" in probe["error"]


HELPER = """#!/bin/sh
echo run >> {runs}
echo '{{"Username": "reader", "Secret": "s3cret"}}'
"""


@pytest.fixture
def helped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A login by a helper; return the file that has a line for each of its runs."""
    runs = tmp_path / "runs"
    runs.touch()
    helper = tmp_path / "docker-credential-tests"
    helper.write_text(HELPER.format(runs=runs))
    helper.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    write_secret(tmp_path / "config.json", '{"credsStore": "tests"}')
    return runs


def blob(port: int, config: Path) -> dict[str, Any]:
    where = {"kind": "oci", "registry": f"127.0.0.1:{port}", "repository": "a/b"}
    what = {"digest": f"sha256:{'0' * 64}", "docker_config": str(config)}
    known = {"size": len(DATA), "unit": UNIT, "proxy": "none", "insecure": True}
    return where | what | known


def test_a_refused_login_does_not_run_its_helper_again_and_again(
    sanitized_build: Path, helped: Path, tmp_path: Path
) -> None:
    def refuse(_: str) -> bytes:
        return response('401 No\nWWW-Authenticate: Basic realm="x"')

    began_s = time.monotonic()
    with fetching(sanitized_build, refuse, log=tmp_path / "log") as (server, shell):
        source = shell.add(blob(server.port, tmp_path / "config.json"))
        for _ in range(20):
            assert shell.read(source, 0, UNIT, deadline_s=0.3).result == -errno.EIO
            time.sleep(0.3)  # what has just failed fails at once
    runs = len(helped.read_bytes().splitlines())
    assert 2 <= runs <= 10 + 1 + (time.monotonic() - began_s) / 5
    assert len(server.requests) > runs


class Registry:
    """A registry of one blob. Its token server gives the first token at once, and
    others once ``go_on`` is set; ``seen`` are those that were sent."""

    def __init__(self, life_s: int) -> None:
        self.life_s = life_s
        self.tokens = 0
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.seen: set[str] = set()

    def close(self) -> None:
        """Keep nobody waiting any longer."""
        self.go_on.set()

    def __call__(self, request: str) -> bytes:
        if request.startswith("GET /token"):
            self.tokens += 1
            token = {"token": f"t{self.tokens}", "expires_in": self.life_s}
            if self.tokens > 1:
                self.asked.set()
                self.go_on.wait(60)
            return response("200 OK", json.dumps(token).encode())
        token_sent = re.search(r"(?im)^authorization: bearer (\S+)", request)
        if not token_sent:
            return response('401 No\nWWW-Authenticate: Bearer realm="/token"')
        self.seen.add(token_sent[1])
        return ranged(request, BLOB)


#: More units than are read before a token ends.
BLOB = bytes(4000 * UNIT)


@contextmanager
def reader(build: Path, registry: Registry) -> Iterator[Callable[[], int]]:
    """Yield what reads another unit each time, and returns its result."""
    with (
        scripted_server(registry) as server,
        closing(registry),
        FetchShell(build) as shell,
    ):
        keys = {
            "kind": "oci",
            "registry": f"127.0.0.1:{server.port}",
            "repository": "x",
        }
        keys |= {"digest": f"sha256:{'0' * 64}", "insecure": True}
        source = shell.add({"size": len(BLOB), "unit": UNIT, "proxy": "none", **keys})
        units = iter(range(0, len(BLOB), UNIT))
        try:
            yield lambda: shell.read(source, next(units), UNIT).result
        finally:
            assert sum(shell.stats()["failures"].values()) == 0


@pytest.mark.parametrize("comes", [True, False])
def test_a_token_that_is_good_is_sent_while_it_is_renewed(
    sanitized_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """However slow the token server is; nor does an end wait for it."""
    monkeypatch.setenv("BTRFS_UBLK_RUN_DIR", str(tmp_path))
    registry = Registry(life_s=8)
    with reader(sanitized_build, registry) as read:
        wait_until(lambda: read() == 0 and registry.asked.is_set())
        assert read() == 0 and registry.seen == {"t1"}
        if comes:
            registry.go_on.set()
            wait_until(lambda: read() == 0 and "t2" in registry.seen)
            assert registry.tokens == 2


def test_without_a_good_token_requests_wait(
    sanitized_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BTRFS_UBLK_RUN_DIR", str(tmp_path))
    registry = Registry(life_s=2)
    with reader(sanitized_build, registry) as read:
        assert read() == 0
        time.sleep(2)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(read)
            assert registry.asked.wait(30)
            assert registry.seen == {"t1"} and not waits.done()
            registry.go_on.set()
            assert waits.result() == 0
        assert registry.seen == {"t1", "t2"}
