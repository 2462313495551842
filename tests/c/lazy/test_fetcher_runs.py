"""Runs: requests for several units, with answers that break off or are wrong within."""

import random
import re
import threading
import time
from collections.abc import Callable, Iterable
from errno import EIO
from pathlib import Path
from typing import Any

import pytest
from support.fetchers import fetching
from support.shells import (
    EngineShell,
    FetchShell,
    VirtualData,
    describe,
    root_of,
    units_of,
)
from support.waiting import wait_until
from support.web_servers import (
    ScriptedServer,
    range_of,
    ranged,
    response,
    scripted_server,
)

BLOCK = UNIT = 4096
UNITS = 64
SIZE = UNITS * UNIT
DATA = random.Random(12).randbytes(SIZE)
MIB = 1 << 20

Range = tuple[int, int]
Bytes = bytes | Iterable[bytes]


def units_asked(request: str) -> Range:
    """First and last unit that a request asks for."""
    first, last = range_of(request)
    return first // UNIT, last // UNIT


def answer(request: str, data: bytes = DATA, *, etag: str = "1") -> tuple[bytes, bytes]:
    """Head and body of a right answer."""
    head, end, body = ranged(request, data, f'ETag: "{etag}"').partition(b"\r\n\r\n")
    return head + end, body


def right(request: str) -> bytes:
    return b"".join(answer(request))


LARGE = random.Random(8).randbytes(MIB)


def large(request: str) -> bytes:
    """Answer with a range of LARGE."""
    return ranged(request, LARGE)


def source(server: ScriptedServer, **keys: Any) -> dict[str, Any]:
    url = {"kind": "http", "url": server.url(), "proxy": "none"}
    return {"size": SIZE, "unit": UNIT, **url, **keys}


def asked(server: ScriptedServer) -> list[Range]:
    return [units_asked(request) for request in server.requests]


def wait_for_units(shell: FetchShell, count: int) -> dict[str, Any]:
    wait_until(lambda: bool(shell.stats()["units_fetched"] >= count))
    return shell.stats()


class Once:
    """Answers the first request with ``script``, and others rightly."""

    def __init__(self, script: Callable[[str], Bytes]) -> None:
        self._script = script
        self._lock = threading.Lock()
        self._first = True

    def __call__(self, request: str) -> Bytes:
        with self._lock:
            first, self._first = self._first, False
        return self._script(request) if first else right(request)


@pytest.mark.data
@pytest.mark.usefixtures("carrier")
@pytest.mark.parametrize("units", [0, 2])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_what_is_cut_off_costs_what_lacks(
    sanitized_build: Path, tmp_path: Path, units: int, more: int
) -> None:
    """Each unit that came is there; the one that was arriving has failed, and comes
    alone when it is wanted; those behind it come together."""
    came = units * UNIT + more

    def cut(request: str) -> bytes:
        head, body = answer(request)
        return head + body[: max(came, 0)]

    with fetching(sanitized_build, Once(cut), log=tmp_path / "log") as (server, shell):
        number = shell.add(source(server))
        shell.prefetch(number, 0, 6 * UNIT)
        whole = max(came, 0) // UNIT
        if came > 0:
            stats = wait_for_units(shell, 5)
            assert stats["units_fetched"] == 5
            again = [(whole + 1, 5)]
        else:  # it was refused as a whole, and nobody waits for any of it
            wait_until(lambda: bool(shell.stats()["failures"]["transient"]))
            again = []
        assert asked(server) == [(0, 5), *again]
        assert shell.read(number, 0, 6 * UNIT).data == DATA[: 6 * UNIT]
        later = asked(server)[1 + len(again) :]
        if came > 0:
            assert later == [(whole, whole)]
        assert shell.stats()["failures"]["transient"] == 1


@pytest.mark.data
def test_many_cuts(sanitized_build: Path, tmp_path: Path) -> None:
    """At places drawn at random, of most answers: no byte is wrong."""
    draw = random.Random(3)

    def some(request: str) -> bytes:
        head, body = answer(request)
        return head + body[: draw.choice([draw.randrange(len(body)), len(body)])]

    with fetching(sanitized_build, some, log=tmp_path / "log") as (server, shell):
        number = shell.add(source(server))
        shell.prefetch(number, 0, SIZE)
        for unit in range(0, UNITS, 8):
            wanted = DATA[unit * UNIT :][: 8 * UNIT]
            assert shell.read(number, unit * UNIT, 8 * UNIT).data == wanted


@pytest.mark.usefixtures("carrier")
@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("200 OK", "wrong_answer"),
        ("another range", "wrong_answer"),
        ("another object", "changed"),
        ("404 Not Found", "gone"),
        ("503 Busy\nRetry-After: 1", "busy"),
    ],
)
def test_what_is_refused_is_refused_once(
    sanitized_build: Path, tmp_path: Path, fault: str, failure: str
) -> None:
    """And nothing of it is delivered, although its bytes may be right."""

    def refused(request: str) -> bytes:
        first, last = units_asked(request)
        body = DATA[first * UNIT : (last + 1) * UNIT]
        if fault == "another range":
            at = f"{UNIT}-{UNIT + len(body) - 1}/{SIZE}"
            return response(f"206 Partial Content\nContent-Range: bytes {at}", body)
        if fault == "another object":
            return b"".join(answer(request, DATA[::-1], etag="2"))
        return response(fault, DATA if fault[0] == "2" else b"")

    with fetching(sanitized_build, right, "changed=100", log=tmp_path / "log") as (
        server,
        shell,
    ):
        number = shell.add(source(server))
        assert shell.read(number, SIZE - UNIT, UNIT).data == DATA[-UNIT:]
        server.script = Once(refused)
        shell.prefetch(number, 0, 8 * UNIT)
        # Another object is none before it is seen twice.
        failure = "transient" if failure == "changed" else failure
        wait_until(lambda: bool(shell.stats()["failures"][failure]))
        stats = shell.stats()
        assert stats["units_fetched"] == 1 and stats["failures"][failure] == 1
        time.sleep(0.2)  # until it is asked again
        assert shell.read(number, 0, 8 * UNIT).data == DATA[: 8 * UNIT]


def test_one_who_says_once_that_it_has_changed_is_asked_again(
    sanitized_build: Path, tmp_path: Path
) -> None:
    """As a store may that is starting; one that says the same again is believed."""
    tags = iter("2345")

    def other(request: str) -> bytes:
        return b"".join(answer(request, DATA[::-1], etag="2"))

    def any_other(request: str) -> bytes:
        tag = next(tags, None)
        if tag is None:
            return right(request)
        return b"".join(answer(request, DATA[::-1], etag=tag))

    with fetching(sanitized_build, right, log=tmp_path / "log") as (server, shell):
        number = shell.add(source(server))
        assert shell.read(number, SIZE - UNIT, UNIT).data == DATA[-UNIT:]
        server.script = Once(other)
        assert shell.read(number, 0, UNIT).data == DATA[:UNIT]
        server.script = any_other
        assert shell.read(number, 4 * UNIT, UNIT).data == DATA[4 * UNIT : 5 * UNIT]
        assert shell.stats()["failures"]["changed"] == 0
        server.script = other
        assert shell.read(number, 8 * UNIT, UNIT).result == -EIO
        failures = shell.stats()["failures"]
        assert (failures["changed"], failures["transient"]) == (1, 1 + 4 + 1)
    assert (tmp_path / "log").read_text().count("event=mirror_changed") == 1


@pytest.mark.data
def test_wrong_bytes_cost_their_unit(sanitized_build: Path, tmp_path: Path) -> None:
    """It comes again, alone; its neighbours are right, and are not asked for again."""
    bad = 20

    def corrupt(request: str) -> bytes:
        first, last = units_asked(request)
        broken = bytearray(DATA)
        if first < bad <= last:
            broken[bad * UNIT + 7] ^= 1
        return b"".join(answer(request, bytes(broken)))

    with scripted_server(corrupt) as server:
        with lazy_shell(sanitized_build, tmp_path, server) as shell:
            read_in_order(shell)
            fetcher = shell.stats()["lazy"][0]["fetcher"]
        assert fetcher["failures"]["wrong_digest"] == 1
        assert fetcher["units_fetched"] == UNITS + 1
        assert (bad, bad) in asked(server)


def lazy_shell(build: Path, directory: Path, server: ScriptedServer) -> Any:
    """A lazy segment of all units, with digests and a cache."""
    virtual = VirtualData(build, directory, SIZE)
    units = units_of(DATA, UNIT)
    digests = [unit.hex() for unit in units]
    root = root_of(units, size_bytes=SIZE, unit_bytes=UNIT)
    virtual.add(source(server, digests=digests, root=root), DATA, 0)
    paths = {"map": str(virtual.map), "cache": str(directory / "cache")}
    return EngineShell(build, describe({"kind": "lazy", "length": SIZE} | paths))


def read_in_order(shell: EngineShell) -> None:
    for unit in range(UNITS):
        wanted = DATA[unit * UNIT :][:UNIT]
        assert shell.request(f"read {unit * UNIT} {UNIT}") == wanted


@pytest.mark.timing
def test_requests_that_share_a_link_stay_long(
    sanitized_build: Path, tmp_path: Path
) -> None:
    """A request is for half a second's worth of what all of them get together."""
    unit, size = 64 << 10, 24 * MIB
    data = random.Random(10).randbytes(size)
    link = threading.Lock()

    def slow(request: str) -> Iterable[bytes]:
        whole = ranged(request, data)
        for at in range(0, len(whole), 16 << 10):
            with link:
                time.sleep(0.008)
            yield whole[at : at + (16 << 10)]

    with fetching(sanitized_build, slow, log=tmp_path / "log") as (server, shell):
        number = shell.add(source(server, size=size, unit=unit))
        for at in range(0, size, MIB):  # as a prefetch does, of 32 units at a time
            shell.prefetch(number, at, MIB)
            wait_for_units(shell, at // unit)
        wait_for_units(shell, size // unit)
        assert len(server.requests) <= 80


def test_reading_ahead_goes_on_over_what_is_cached(
    sanitized_build: Path, tmp_path: Path
) -> None:
    """A reader in order is known by the reads that end a unit, where the cache has what
    was read ahead, however small they are: it never waits for a request of its own."""
    unit, size = 64 << 10, 8 * MIB
    data = random.Random(9).randbytes(size)
    with scripted_server(lambda request: ranged(request, data)) as server:
        virtual = VirtualData(sanitized_build, tmp_path, size)
        virtual.add(source(server, size=size, unit=unit), data, 0)
        paths = {"map": str(virtual.map), "cache": str(tmp_path / "cache")}
        segment = {"kind": "lazy", "length": size} | paths
        with EngineShell(sanitized_build, describe(segment)) as shell:

            def is_at_rest() -> bool:
                now = shell.stats()["lazy"][0]["fetcher"]
                keys = ("units_queued", "units_in_flight", "unstored_bytes")
                return not any(now[key] for key in keys)

            for at in range(0, size, BLOCK):
                wanted = data[at : at + BLOCK]
                assert shell.request(f"read {at} {BLOCK}") == wanted
                if not (at + BLOCK) % unit:
                    wait_until(is_at_rest)
        firsts = [range_of(request)[0] for request in server.requests]
    assert len(firsts) <= 12, firsts


@pytest.mark.usefixtures("carrier")
def test_memory_is_bounded(sanitized_build: Path, tmp_path: Path) -> None:
    """A run takes the memory of a unit at a time, and waits where there is none: that
    of two units here, half of which is for those who read."""
    unit = 64 << 10

    options = (f"buffer={6 * unit}", "transfers=8")
    with fetching(sanitized_build, large, *options, log=tmp_path / "log") as (
        server,
        shell,
    ):
        number = shell.add(source(server, size=MIB, unit=unit))
        shell.prefetch(number, 0, 8 * unit)
        most = 0

        def is_done() -> bool:
            nonlocal most
            stats = shell.stats()
            most = max(most, stats["buffer_bytes"])
            return bool(stats["units_fetched"] >= 8)

        wait_until(is_done)
        assert most <= 3 * unit
        assert shell.read(number, 0, MIB).data == LARGE
        assert shell.stats()["buffer_bytes"] <= 6 * unit


@pytest.mark.parametrize("more", [0, 1])
def test_what_does_not_say_its_length_comes_unit_by_unit(
    sanitized_build: Path, tmp_path: Path, more: int
) -> None:
    """Else units would be delivered, and pinned, before it is known that the response
    is longer than it should be."""

    def chunked(request: str) -> bytes:
        head, body = answer(request)
        head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
        pieces = [body[at : at + UNIT] for at in range(0, len(body), UNIT)]
        pieces += [b"x"] * more
        coded = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        return head + coded + b"0\r\n\r\n"

    with fetching(sanitized_build, chunked, log=tmp_path / "log") as (server, shell):
        number = shell.add(source(server))
        shell.prefetch(number, 0, 6 * UNIT)
        read = shell.read(number, 0, 6 * UNIT, deadline_s=3 if more else 60)
        stats = shell.stats()
    assert read.result == (-5 if more else 0)
    assert more or read.data == DATA[: 6 * UNIT]
    assert stats["units_fetched"] == (0 if more else 6)
    long = [range_ for range_ in asked(server) if range_[0] != range_[1]]
    assert len(long) <= 2  # of our client, and of libcurl, which it leaves it to
    assert bool(stats["failures"]["wrong_answer"]) == bool(more)
    # The deadline may come while an attempt is under way.
    assert more or stats["failures"]["transient"] == 0
