"""Lazy segments that are served over HTTP: from a good server, and from bad ones."""

import errno
import random
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.shells import (
    BLOCK,
    UNIT,
    EngineShell,
    VirtualData,
    describe,
    root_of,
    units_of,
)
from support.web_servers import ranged, response, scripted_server

SIZE = 64 * UNIT
DEADLINE_S = 6.0  # more than a host is left alone


@pytest.fixture
def data() -> bytes:
    return random.Random(11).randbytes(SIZE - 1234)


def http_source(url: str, data: bytes, *, digests: bool = False) -> dict[str, Any]:
    source = {"size": len(data), "unit": UNIT, "kind": "http", "url": url}
    if digests:
        units = units_of(data, UNIT)
        source["digests"] = [unit.hex() for unit in units]
        source["root"] = root_of(units, size_bytes=len(data), unit_bytes=UNIT)
    return source


def lazy(directory: Path, **keys: Any) -> dict[str, Any]:
    paths = {"map": str(directory / "map"), "cache": str(directory / "cache")}
    return {"kind": "lazy", "length": SIZE} | paths | keys


@dataclass
class Fault:
    """Of a share of the answers, when it is on."""

    kind: str
    percent: int
    data: bytes
    on: bool = True

    def __post_init__(self) -> None:
        self._draw = random.Random(f"{self.kind} {self.percent}")

    def __call__(self, request: str) -> bytes:
        right = ranged(request, self.data, 'ETag: "one"')
        head, end, body = right.partition(b"\r\n\r\n")
        if not self.on or self._draw.randrange(100) >= self.percent:
            return right
        match self.kind:
            case "5xx":
                return response("500 Internal Server Error")
            case "reset":
                return b""
            case "short":
                return head + end + body[: len(body) // 2]
            case "length":
                size = b"Content-Length: %d"
                longer = size % (len(body) + 4)
                return head.replace(size % len(body), longer) + end + body + b"more"
            case "corrupt":
                return head + end + bytes([body[0] ^ 1]) + body[1:]
            case "hang":
                while self.on:
                    time.sleep(0.1)
                return b""
        raise AssertionError(self.kind)


KINDS = ["5xx", "reset", "short", "length", "corrupt"]


@pytest.mark.data
def test_two_objects_under_one_name(sanitized_build: Path, tmp_path: Path) -> None:
    """Both come at once, of servers that differ; nothing of one of them is pinned."""
    contents = {etag: random.Random(etag).randbytes(2 * UNIT) for etag in "ab"}
    both_asked = threading.Barrier(2)

    def answer(request: str, etag: str) -> bytes:
        return ranged(request, contents[etag], f'ETag: "{etag}"')

    def differ(request: str) -> bytes:
        with suppress(threading.BrokenBarrierError):
            both_asked.wait(10)
        return answer(request, "a" if "bytes=0-" in request else "b")

    virtual = VirtualData(sanitized_build, tmp_path, SIZE)
    with scripted_server(differ) as server:
        virtual.add(http_source(server.url(), contents["a"]), contents["a"], 0)
        with EngineShell(sanitized_build, describe(lazy(tmp_path))) as shell:
            assert shell.request(f"read 0 {2 * UNIT}") == errno.EIO
        with closing(sqlite3.connect(virtual.map)) as map_file:
            ((identity,),) = map_file.execute("SELECT identity FROM identities")
        etag = identity.split('"')[1]
        server.script = lambda request: answer(request, etag)
        with EngineShell(sanitized_build, describe(lazy(tmp_path))) as shell:
            assert shell.request(f"read 0 {2 * UNIT}") == contents[etag]


@pytest.mark.data
@pytest.mark.parametrize("kind", KINDS)
def test_some_faults(
    sanitized_build: Path, tmp_path: Path, data: bytes, kind: str
) -> None:
    faults(sanitized_build, tmp_path, data, kind, 10)


@pytest.mark.data
def test_nothing_but_faults(sanitized_build: Path, tmp_path: Path, data: bytes) -> None:
    """All kinds at the same time, each with a own server: most of it is waiting."""
    kinds = [*KINDS, "hang"]
    with ThreadPoolExecutor(len(kinds)) as threads:
        running = []
        for kind in kinds:
            (tmp_path / kind).mkdir()
            words = (sanitized_build, tmp_path / kind, data, kind, 100)
            running.append(threads.submit(faults, *words))
    failed = {kind: x.exception() for kind, x in zip(kinds, running) if x.exception()}
    assert failed == {}


def faults(build: Path, tmp_path: Path, data: bytes, kind: str, percent: int) -> None:
    """No wrong byte; what fails, fails in time; and all is well when they are over."""
    virtual = VirtualData(build, tmp_path, SIZE)
    fault = Fault(kind, percent, data)
    with scripted_server(fault) as server:
        virtual.add(http_source(server.url(), data, digests=True), data, 0)
        deadline_s = DEADLINE_S if percent == 100 else 60
        segment = describe(lazy(tmp_path, deadline_s=deadline_s))
        with EngineShell(build, segment) as shell:
            failed = 0
            for unit in range(0, 64, 32 if percent == 100 else 1):
                answer = shell.request(f"read {unit * UNIT} {BLOCK}")
                failed += answer == errno.EIO
                assert answer in (errno.EIO, virtual.content(unit * UNIT, BLOCK))
            assert failed == (2 if percent == 100 else 0)
            fault.on = False
            time.sleep(0.3)  # what has just failed fails at once
            for unit in range(64):
                wanted = virtual.content(unit * UNIT, UNIT)
                assert shell.request(f"read {unit * UNIT} {UNIT}") == wanted
