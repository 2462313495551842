"""Second requests beside ones that are silent (docs/design/fetching.md), sanitized."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from support.shells import (
    EngineShell,
    FetchShell,
    StoreShell,
    describe,
    engine_shell,
    fetch_shell,
    units_of,
)
from support.waiting import DEADLINE_S, wait_until
from support.web_servers import ScriptedServer, response, scripted_server

UNIT = 64 << 10
UNITS = 256
#: Units that are read first, all in the part of the object that one cache has. They
#: earn two second requests.
BEFORE = 48
#: Second requests go out after so much silence, so that a busy machine keeps those; and
#: no first one is given up for it, before its server is too slow, after 15 s.
HEDGE = ("hedge=2000", "silent=600000", "unhealthy=600000")
#: There are none, so that all that were earned are left.
NO_HEDGE = "hedge=600000"
DATA = b"".join(number.to_bytes(2, "little") * (UNIT // 2) for number in range(UNITS))


def good(request: str, data: bytes = DATA) -> bytes:
    found = re.search(r"(?im)^range: bytes=(\d+)-(\d+)", request)
    assert found
    first, last = int(found[1]), int(found[2])
    head = f"206 Partial Content\nContent-Range: bytes {first}-{last}/{len(data)}"
    return response(f'{head}\nETag: "1"', data[first : last + 1])


def wrong(request: str) -> bytes:
    return good(request, b"\xff" * len(DATA))


class Servers:
    """Servers of one object; each answers until it is told to be silent."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.end = Event()
        stack.callback(self.end.set)
        self.all: list[ScriptedServer] = []

    def add(self, script: Callable[[str], bytes] = good) -> ScriptedServer:
        self.all.append(self._stack.enter_context(scripted_server(script)))
        self._stack.callback(self.end.set)  # before the server waits for its threads
        return self.all[-1]

    def silent(self, _: str) -> bytes:
        self.end.wait()
        return b""

    def late(self, script: Callable[[str], bytes]) -> Callable[[str], bytes]:
        """Answer later than second requests go out."""

        def answer(request: str) -> bytes:
            self.end.wait(1.5)
            return script(request)

        return answer

    def after(
        self, event: Event, script: Callable[[str], bytes]
    ) -> Callable[[str], bytes]:
        """Answer when that has happened."""

        def answer(request: str) -> bytes:
            assert event.wait(DEADLINE_S)
            return script(request)

        return answer

    def counts(self) -> list[int]:
        return [len(each.requests) for each in self.all]


@contextmanager
def some_servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def servers() -> Iterator[Servers]:
    with some_servers() as servers:
        yield servers


@pytest.fixture
def shell(sanitized_build: Path, tmp_path: Path) -> Iterator[FetchShell]:
    with fetch_shell(sanitized_build, log=tmp_path / "log") as shell:
        yield shell


def http(server: ScriptedServer, **keys: Any) -> dict[str, Any]:
    return {"kind": "http", "url": server.url(), "proxy": "none"} | keys


def read_all(shell: FetchShell, source: int, first: int, count: int) -> None:
    for number in range(first, first + count):
        answer = shell.read(source, number * UNIT, UNIT)
        assert answer.data == DATA[number * UNIT :][:UNIT]


def test_a_mirror_that_falls_silent_fails_no_attempt(
    sanitized_build: Path, tmp_path: Path
) -> None:
    """Readers have what they want from the other one, and it is asked again only where
    a second request has been earned."""

    with (
        some_servers() as servers,
        fetch_shell(sanitized_build, *HEDGE, log=tmp_path / "log") as shell,
    ):
        mirrors = [http(servers.add()), http(servers.add())]
        source = shell.add({"size": len(DATA), "unit": UNIT, "mirrors": mirrors})
        read_all(shell, source, 0, BEFORE)
        servers.all[0].script = servers.silent
        before = servers.counts()[0]
        read_all(shell, source, BEFORE, 100)
        stats = shell.stats()
        asked = servers.counts()[0] - before
        assert 0 < stats["hedges_won"] <= stats["hedges"] <= (BEFORE + 100) // 20
        assert asked <= 3  # and then it is left alone
        assert sum(servers.counts()) <= BEFORE + 100 + stats["hedges"] + asked
        assert not any(stats["failures"].values())
        host = stats["hosts"][f"127.0.0.1:{servers.all[0].port}"]
        assert host["failures"] == 0


def test_second_requests_are_one_in_twenty_from_the_first_on(
    servers: Servers, shell: FetchShell
) -> None:
    """Also where each request would have one."""
    mirrors = [http(servers.add(servers.late(good))) for _ in range(2)]
    source = shell.add({"size": len(DATA), "unit": UNIT, "mirrors": mirrors})
    shell.begin(source, 0, UNIT)
    shell.finish()
    assert shell.stats()["hedges"] == 0  # it is late, and none is earned
    for first in range(2, 194, 48):
        for number in range(first, first + 48, 2):
            shell.begin(source, number * UNIT, UNIT, deadline_s=60)
        shell.finish()
        stats = shell.stats()
        assert 20 * stats["hedges"] <= stats["attempts"]
    assert stats["hedges"] > 0


def test_two_gateways_of_which_one_is_silent(
    servers: Servers, shell: FetchShell
) -> None:
    """All at once, with hardly any second request: what waits is given up soon."""
    mirrors = [http(servers.add(servers.silent)), http(servers.add())]
    source = shell.add({"size": len(DATA), "unit": UNIT, "mirrors": mirrors})
    reads = {
        shell.begin(source, number * UNIT, UNIT, deadline_s=120): number
        for number in range(0, UNITS, 8)
    }
    for number, answer in shell.finish().items():
        assert answer.data == DATA[reads[number] * UNIT :][:UNIT]
        assert answer.ms < 50_000  # half of the deadline was the rule before
    stats = shell.stats()
    assert stats["hedges"] <= stats["attempts"] // 20
    assert stats["read_errors"] == 0


@pytest.mark.parametrize("silent", [1, 3])
def test_caches_that_are_silent_do_not_send_readers_to_the_origin(
    sanitized_build: Path, tmp_path: Path, silent: int
) -> None:
    """Three are only slow: the first one that is asked answers when two have been."""
    both_asked = Event()

    def slow(request: str) -> bytes:
        if sum(servers.counts()) >= before + 2:
            both_asked.set()
        return servers.after(both_asked, good)(request)

    with (
        some_servers() as servers,
        fetch_shell(sanitized_build, *HEDGE, log=tmp_path / "log") as shell,
    ):
        source, caches = behind_caches(servers, shell)
        before = sum(servers.counts())
        for cache in caches[:silent]:
            cache.script = slow if silent == 3 else servers.silent
        read_all(shell, source, BEFORE, 10)
        stats = shell.stats()
        assert stats["hedges"] > 0
        assert sum(servers.counts()) <= BEFORE + 10 + (BEFORE + 10) // 20
        assert servers.counts()[0] == 0
        assert not any(stats["failures"].values())


def behind_caches(
    servers: Servers, shell: FetchShell
) -> tuple[int, list[ScriptedServer]]:
    """Return a source with three caches, which are known to be quick, and these: the
    one that is asked first comes first."""
    origin = servers.add()
    caches = [servers.add() for _ in range(3)]
    mirror = http(origin, via=[each.url("").rstrip("/") for each in caches])
    source = shell.add({"size": len(DATA), "unit": UNIT, "mirrors": [mirror]})
    shell.pin(source, 'etag "1"')
    read_all(shell, source, 0, BEFORE)
    return source, sorted(caches, key=lambda each: -len(each.requests))


def test_a_second_request_that_is_to_ask_later_is_no_failure(
    servers: Servers, shell: FetchShell
) -> None:
    """One cache is silent, and the others are getting it: the origin is left alone."""
    source, (silent, *others) = behind_caches(servers, shell)
    silent.script = servers.silent
    chances = count()

    def later(request: str) -> bytes:
        """As one that gets it from its origin, for a while."""
        is_there = next(chances) >= 10
        return good(request) if is_there else response("425 Too Early")

    for other in others:
        other.script = later
    read_all(shell, source, BEFORE, 1)
    assert shell.stats()["hedges"] > 0
    assert servers.counts()[0] == 0


def test_a_cache_that_was_silent_is_not_asked_again_soon(
    sanitized_build: Path, tmp_path: Path
) -> None:
    options = (NO_HEDGE, "silent=4000", "unhealthy=600000")
    with (
        some_servers() as servers,
        fetch_shell(sanitized_build, *options, log=tmp_path / "log") as shell,
    ):
        source, (silent, *_others) = behind_caches(servers, shell)
        silent.script = servers.silent
        silent.requests.clear()
        read_all(shell, source, BEFORE, 4)
        assert len(silent.requests) == 1
        assert servers.counts()[0] == 0
        assert shell.stats()["failures"]["transient"] == 1


def test_a_prefetch_has_no_second_requests(servers: Servers, shell: FetchShell) -> None:
    mirrors = [http(servers.add(servers.late(good))), http(servers.add())]
    source = shell.add({"size": len(DATA), "unit": UNIT, "mirrors": mirrors})
    shell.prefetch(source, 0, 4 * UNIT)
    wait_until(lambda: shell.stats()["units_prefetched"] == 4)
    assert shell.stats()["hedges"] == 0
    assert servers.counts()[1] == 0


def lazy(path: Path) -> dict[str, Any]:
    return {"kind": "lazy", "length": len(DATA), "map": str(path)}


def hedging_shell(
    build: Path, path: Path, log: Path
) -> AbstractContextManager[EngineShell]:
    environment = {"BTRFS_UBLK_HEDGE_MS": "2000", "BTRFS_UBLK_SILENT_MS": "600000"}
    return engine_shell(build, describe(lazy(path)), environment=environment, log=log)


def a_map(
    build: Path, directory: Path, servers: Servers, *, digests: bool = False
) -> Path:
    """A map of the object, with all servers as its mirrors."""
    source: dict[str, Any] = {"size": len(DATA), "unit": UNIT}
    if digests:
        source["digests"] = [unit.hex() for unit in units_of(DATA, UNIT)]
    source["mirrors"] = [http(each) for each in servers.all]
    directory.mkdir()
    with StoreShell(build, directory / "map") as store:
        store.add([[0, len(DATA), 0, 0]], source)
    return directory / "map"


def earn(shell: EngineShell, servers: Servers) -> None:
    """Have one second request earned, by readers who skip units. A second one would
    follow the first, where that has failed."""
    for number in range(UNITS - 1, UNITS - 50, -2):
        data = DATA[number * UNIT :][:4096]
        assert shell.request(f"read {number * UNIT} 4096") == data
    for each in servers.all:
        each.requests.clear()


@pytest.mark.data
def test_wrong_bytes_do_not_end_the_other_request(
    sanitized_build: Path, tmp_path: Path
) -> None:
    refused = Event()
    with some_servers() as servers:
        first, _ = servers.add(), servers.add(wrong)
        path = a_map(sanitized_build, tmp_path / "maps", servers, digests=True)
        with hedging_shell(sanitized_build, path, tmp_path / "log") as shell:
            earn(shell, servers)
            before = shell.stats()["lazy"][0]["fetcher"]
            first.script = servers.after(refused, good)
            shell.send("read 0 4096")
            wait_until(lambda: "event=wrong_digest" in (tmp_path / "log").read_text())
            refused.set()
            assert shell.answer("read 0 4096") == DATA[:4096]
            stats = shell.stats()["lazy"][0]["fetcher"]
        assert servers.counts() == [1, 1]
        assert stats["hedges"] - before["hedges"] == 1
        assert stats["hedges_won"] == before["hedges_won"]
        assert stats["failures"]["wrong_digest"] == 1


@pytest.mark.data
def test_of_two_contents_the_first_one_is_pinned(
    sanitized_build: Path, tmp_path: Path
) -> None:
    """Without digests, whoever is first is right, also for a later server."""
    is_read = Event()
    with some_servers() as servers:
        first, _ = servers.add(), servers.add()
        path = a_map(sanitized_build, tmp_path / "maps", servers)
        with hedging_shell(sanitized_build, path, tmp_path / "log") as shell:
            earn(shell, servers)
            before = shell.stats()["lazy"][0]["fetcher"]
            first.script = servers.after(is_read, wrong)
            assert shell.request("read 0 4096") == DATA[:4096]
            is_read.set()
            stats = shell.stats()["lazy"][0]["fetcher"]
        assert servers.counts() == [1, 1]
        assert stats["hedges_won"] - before["hedges_won"] == 1
        assert stats["units_pinned"] - before["units_pinned"] == 1
        first.script = wrong
        with engine_shell(sanitized_build, describe(lazy(path))) as shell:
            assert shell.request("read 0 4096") == DATA[:4096]
            stats = shell.stats()["lazy"][0]["fetcher"]
            assert stats["failures"]["wrong_digest"] > 0
