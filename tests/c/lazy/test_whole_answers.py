"""All of an object for a range of it, as of a cache until it has stored that."""

import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from c.lazy.test_fetcher_runs import DATA, SIZE, UNIT, UNITS, lazy_shell, source
from support.fetchers import fetching
from support.peer import Peer
from support.shells import FetchShell
from support.waiting import wait_until
from support.web_servers import ScriptedServer, response, scripted_server
from system.peers.peers import PEERS

from btrfs_ublk.units import MIB

HEAD = '200 OK\nETag: "1"'
WHOLE = response(HEAD, DATA)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server(lambda _: WHOLE) as server:
        yield server


def unit(number: int, count: int = 1) -> bytes:
    return DATA[number * UNIT :][: count * UNIT]


@pytest.mark.data
@pytest.mark.usefixtures("carrier")
@pytest.mark.parametrize("process", ["", "in-process"])
@pytest.mark.parametrize("first", [0, 5, UNITS - 1])
def test_it_is_sent_once(
    sanitized_build: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: ScriptedServer,
    first: int,
    process: str,
) -> None:
    monkeypatch.setenv("BTRFS_UBLK_FETCH", process)
    with FetchShell(sanitized_build) as shell:
        number = shell.add(source(server))
        assert shell.read(number, first * UNIT, UNIT).data == unit(first)
        assert shell.read(number, 0, SIZE).data == DATA
        stats = shell.stats()
    assert len(server.requests) == stats["whole_answers"] == 1
    assert stats["units_fetched"] == UNITS
    assert 0 < stats["whole_units"] < UNITS


@pytest.mark.data
@pytest.mark.parametrize("bad", [None, 0, 7, UNITS - 1])
def test_all_of_it_is_verified_and_cached(
    sanitized_build: Path, tmp_path: Path, server: ScriptedServer, bad: int | None
) -> None:
    """What is wrong is asked for again, when it is wanted."""
    broken = bytearray(DATA)
    if bad is not None:
        broken[bad * UNIT + 7] ^= 1
    server.script = lambda _: response(HEAD, bytes(broken))
    right = UNITS - (bad is not None)
    with lazy_shell(sanitized_build, tmp_path, server) as shell:
        assert shell.request(f"read {5 * UNIT} {UNIT}") == unit(5)

        def stats() -> dict[str, Any]:
            return dict(shell.stats()["lazy"][0]["fetcher"])

        wait_until(lambda: stats()["units_stored"] == right)
        assert stats()["units_verified"] == right
        assert stats()["failures"]["wrong_digest"] == (bad is not None)
        server.script = lambda _: WHOLE
        for number in range(UNITS):
            assert shell.request(f"read {number * UNIT} {UNIT}") == unit(number)
    assert len(server.requests) == 1 + (bad is not None)


@pytest.mark.usefixtures("carrier")
@pytest.mark.parametrize("demanded", [True, False])
def test_who_comes_while_it_arrives_waits_for_it(
    sanitized_build: Path, server: ScriptedServer, demanded: bool
) -> None:
    """For any part; and one who leaves changes nothing for others."""
    go_on = threading.Event()

    def slow(_: str) -> Iterable[bytes]:
        yield WHOLE[: -20 * UNIT + 100]
        go_on.wait(60)
        yield WHOLE[-20 * UNIT + 100 :]

    server.script = slow
    with FetchShell(sanitized_build) as shell:
        number = shell.add(source(server))
        if demanded:
            assert shell.read(number, 3 * UNIT, UNIT).data == unit(3)
        else:
            shell.prefetch(number, 3 * UNIT, UNIT)
        wait_until(lambda: bool(shell.stats()["units_fetched"] == UNITS - 20))
        leaves = shell.begin(number, 50 * UNIT, UNIT, deadline_s=0.2)
        shell.wait_for([leaves])
        stays = shell.begin(number, 40 * UNIT, 24 * UNIT)
        there = shell.begin(number, 10 * UNIT, UNIT)
        shell.wait_for([there])
        go_on.set()
        assert shell.finish()[stays].data == unit(40, 24)
        assert shell.read(number, 0, SIZE).data == DATA
    assert len(server.requests) == 1


def test_the_same_is_taken_of_one_of_several_answers(
    sanitized_build: Path, server: ScriptedServer
) -> None:
    """The others are ended: of what they were for, all comes with the first one."""
    both, go_on = threading.Barrier(3), threading.Event()
    ended: list[str] = []

    def slow(request: str) -> Iterable[bytes]:
        both.wait(60)
        yield WHOLE[: -SIZE + 100] if request == server.requests[0] else b""
        go_on.wait(60)
        if request != server.requests[0]:
            ended.append(request)
            return
        yield WHOLE[-SIZE + 100 :]

    server.script = slow
    with FetchShell(sanitized_build) as shell:
        number = shell.add(source(server))
        reads = [shell.begin(number, at * UNIT, UNIT) for at in (0, 20, 40)]
        wait_until(lambda: len(server.requests) == 3)
        wait_until(lambda: bool(shell.stats()["units_in_flight"] == 1))
        go_on.set()
        answers = shell.finish()
        assert [answers[read].data for read in reads] == [unit(0), unit(20), unit(40)]
        wait_until(lambda: bool(shell.stats()["units_fetched"] == UNITS))
        assert set(shell.stats()["failures"].values()) == {0}
    assert len(server.requests) == 3


def test_a_larger_one_is_not_kept(sanitized_build: Path) -> None:
    size = 8 * MIB + 1
    data = random.Random(3).randbytes(size)
    with fetching(sanitized_build, lambda _: response(HEAD, data)) as (server, shell):
        number = shell.add(source(server, size=size, unit=MIB))
        for at in (3 * MIB, MIB):
            assert shell.read(number, at, MIB).data == data[at:][:MIB]
        stats = shell.stats()
    assert len(server.requests) == stats["units_fetched"] == stats["whole_answers"] == 2
    assert stats["whole_units"] == 0


def test_readers_do_not_wait_for_memory_of_what_nobody_wants(
    sanitized_build: Path, server: ScriptedServer
) -> None:
    with FetchShell(sanitized_build, f"buffer={6 * UNIT}", "transfers=8") as shell:
        number = shell.add(source(server))
        for at in (UNITS - 1, 0, 33):
            answer = shell.read(number, at * UNIT, UNIT)
            assert answer.data == unit(at) and answer.ms < 4000
        assert shell.read(number, 0, SIZE).data == DATA
        assert shell.stats()["buffer_bytes"] <= 6 * UNIT


def test_one_that_breaks_off_costs_what_lacks(
    sanitized_build: Path, server: ScriptedServer
) -> None:
    cut = iter([20 * UNIT + 100])
    server.script = lambda _: WHOLE[: len(WHOLE) - next(cut, 0)]
    with FetchShell(sanitized_build) as shell:
        number = shell.add(source(server))
        assert shell.read(number, 3 * UNIT, UNIT).data == unit(3)
        wait_until(lambda: bool(shell.stats()["failures"]["transient"]))
        assert shell.stats()["units_fetched"] == UNITS - 21
        assert shell.read(number, 0, SIZE).data == DATA
        assert shell.stats()["units_fetched"] == UNITS
    assert len(server.requests) == 2


@pytest.fixture
def registries(tmp_path: Path) -> Iterator[tuple[Peer, Peer]]:
    """A registry, and another one that is a pull-through cache of it."""
    origin = PEERS["distribution"]
    reason = origin.install()
    if reason:
        pytest.skip(reason)
    with ExitStack() as stack:
        for name in ("origin", "cache"):
            (tmp_path / name).mkdir()
        stack.callback(origin.stop)
        origin.start(tmp_path / "origin")
        remote = {"REGISTRY_PROXY_REMOTEURL": origin.url}
        cache = replace(origin, environment=origin.environment | remote)
        stack.callback(cache.stop)
        cache.start(tmp_path / "cache")
        yield origin, cache


def test_a_pull_through_cache(
    sanitized_build: Path, registries: tuple[Peer, Peer]
) -> None:
    """It sends all of a blob that it has not stored yet."""
    origin, cache = registries
    with FetchShell(sanitized_build) as shell:
        for number, data in enumerate((DATA, DATA[::-1])):
            keys = dict(origin.put("blob", data))
            keys["registry"] = cache.url.removeprefix("http://")
            source = shell.add({**keys, "size": SIZE, "unit": UNIT})
            if number:
                assert shell.ask({"probe": 1, "source": source})["size"] == SIZE
                continue
            for at in (7, 0, 30):
                read = shell.read(source, at * UNIT, UNIT)
                assert read.data == data[at * UNIT :][:UNIT]
            assert shell.read(source, 0, SIZE).data == data
            stats = shell.stats()
            assert stats["attempts"] == stats["whole_answers"] == 1
