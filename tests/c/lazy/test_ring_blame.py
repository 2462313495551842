"""Who is blamed for wrong bytes of a ring of caches (docs/design/hosts.md): scripted
fronts, which say which node had the bytes, and readers with digests."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pytest
from support import compressed
from support.shells import EngineShell, StoreShell, describe, engine_shell, units_of
from support.waiting import wait_until
from support.web_servers import ScriptedServer, response, scripted_server

from btrfs_ublk.content import make_index

UNIT = 64 << 10
UNITS = 96
NODES = 3
DATA = b"".join(bytes([number % 251]) * UNIT for number in range(UNITS))
BAD = 2


def range_of(request: str) -> tuple[int, int]:
    found = re.search(r"(?im)^range: bytes=(\d+)-(\d+)", request)
    assert found
    return int(found[1]), int(found[2])


def without(request: str) -> int:
    found = re.search(r"(?im)^x-site-cache-without: (\d+)\r$", request)
    return int(found[1]) if found else 0


def answer(request: str, data: bytes, *, node: int = 0, slice_: int = UNIT) -> bytes:
    first, last = range_of(request)
    head = f"206 Partial Content\nContent-Range: bytes {first}-{last}/{len(data)}"
    if node:
        head += f"\nX-Site-Cache-Node: {node}\nX-Site-Cache-Slice: {slice_}"
    return response(f'{head}\nETag: "it"', data[first : last + 1])


def node_of(unit: int, left_out: int) -> int:
    """Which node stores a unit."""
    found = unit % NODES + 1
    return found if found != left_out else found % NODES + 1


def stored(unit: int, node: int) -> bytes:
    return b"\xff" * UNIT if node == BAD else DATA[unit * UNIT :][:UNIT]


def front(request: str) -> bytes:
    """Answer as a front of a ring one of whose nodes has stored wrong bytes."""
    first = range_of(request)[0] // UNIT
    nodes = [node_of(unit, without(request)) for unit in range(UNITS)]
    data = b"".join(stored(unit, node) for unit, node in enumerate(nodes))
    return answer(request, data, node=nodes[first])


def good(request: str) -> bytes:
    return answer(request, DATA)


class Site:
    """A host, caches in front of an origin, and what they were asked."""

    def __init__(
        self, shell: EngineShell, origin: ScriptedServer, caches: list[ScriptedServer]
    ) -> None:
        self.shell, self.origin, self.caches = shell, origin, caches

    def read_all(self, *, in_order: bool = False) -> None:
        """Read each unit; in order, others are read ahead of it."""
        for turn in range(UNITS):
            self.read(turn if in_order else turn * 37 % UNITS)

    def read(self, number: int) -> None:
        read = self.shell.request(f"read {number * UNIT} {UNIT}")
        assert read == DATA[number * UNIT :][:UNIT], number

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.shell.stats()["lazy"][0]["fetcher"]
        assert found["read_errors"] == 0
        return found

    def wrong(self) -> int:
        return int(self.stats()["failures"]["wrong_digest"])

    def asked(self) -> int:
        return sum(len(cache.requests) for cache in self.caches)


@contextmanager
def site(
    build: Path,
    path: Path,
    *scripts: Callable[[str], bytes],
    environment: dict[str, str] | None = None,
    whole: Callable[[str], bytes] = good,
    cache: Path | None = None,
    **keys: Any,
) -> Iterator[Site]:
    with ExitStack() as stack:
        origin = stack.enter_context(scripted_server(whole))
        caches = [stack.enter_context(scripted_server(each)) for each in scripts]
        source = {
            "size": len(DATA),
            "unit": UNIT,
            "digests": [unit.hex() for unit in units_of(DATA, UNIT)],
            "kind": "http",
            "url": origin.url(),
            "via": [cache.url("").rstrip("/") for cache in caches],
            **keys,
        }
        with StoreShell(build, path) as store:
            store.add([[0, len(DATA), 0, 0]], source)
        lazy = {"kind": "lazy", "length": len(DATA), "map": str(path)}
        if cache is not None:
            lazy["cache"] = str(cache)
        shell = stack.enter_context(
            engine_shell(
                build, describe(lazy), environment=environment, log=Path(f"{path}.log")
            )
        )
        yield Site(shell, origin, caches)


@pytest.mark.parametrize("client", ["plain", "libcurl"])
def test_a_node_with_wrong_bytes_is_left_out(
    sanitized_build: Path, tmp_path: Path, client: str
) -> None:
    """Each front is asked in vain once, and the ring goes on without that node."""
    keys: dict[str, Any] = {"environment": {"BTRFS_UBLK_HTTP": client}}
    with site(sanitized_build, tmp_path / "map", front, front, front, **keys) as it:
        it.read_all()
        assert it.origin.requests == []
        assert 0 < it.wrong() <= len(it.caches)
        assert it.asked() <= UNITS + it.wrong()
        asked = {without(one) for cache in it.caches for one in cache.requests}
        assert asked == {0, BAD}
        log = (tmp_path / "map.log").read_text()
        assert log.count("event=node_wrong") == it.wrong()
        assert f"wrong content (SHA-256) of node {BAD}" in log


def test_a_request_for_many_units_does_not_hide_it(
    sanitized_build: Path, tmp_path: Path
) -> None:
    """Its answer names the node of the first unit only."""
    with site(sanitized_build, tmp_path / "map", front, front) as it:
        it.read_all(in_order=True)
        assert it.origin.requests == []
        # What is in flight when the node is found, and what is asked for alone then.
        assert 0 < it.wrong() <= UNITS // NODES + 2 * len(it.caches)
        it.stats()


@pytest.mark.usefixtures("sanitized_helpers")
@pytest.mark.parametrize("slices", ["of a frame each", "that frames cross"])
def test_what_cannot_be_decoded_is_wrong_as_well(
    sanitized_build: Path, tmp_path: Path, slices: str
) -> None:
    """Where a frame is of several slices, no node is blamed that may be a good one."""
    frames = list(compressed.frames(DATA, UNIT))
    path = tmp_path / "object"
    path.write_bytes(compressed.seekable(DATA, UNIT))
    make_index(path, tmp_path / "index", codec="zstd", spacing_bytes=UNIT)
    whole = path.read_bytes()
    ends, slice_ = list(accumulate(map(len, frames))), UNIT
    frame_ends = ends
    if slices == "that frames cross":
        slice_ = max(map(len, frames)) * 2 + 1
        ends = list(range(slice_, ends[-1] + slice_, slice_))

    def coded(request: str) -> bytes:
        nodes = [node_of(number, without(request)) for number in range(len(ends))]
        data = bytearray(whole)
        for node, start, end in zip(nodes, [0, *ends], ends, strict=False):
            if node == BAD:
                data[start:end] = bytes(len(data[start:end]))
        node = nodes[bisect(ends, range_of(request)[0])]
        return answer(request, bytes(data), node=node, slice_=slice_)

    keys: dict[str, Any] = {
        "codec": "zstd",
        "index": {"path": str(tmp_path / "index")},
        "whole": lambda request: answer(request, whole),
    }
    with site(sanitized_build, tmp_path / "map", coded, coded, **keys) as it:
        for number, end in enumerate(frame_ends):
            # First those that begin with bytes of a good node, and end with wrong ones.
            start = end - len(frames[number])
            nodes = [node_of(bisect(ends, at), 0) for at in (start, end - 1)]
            if nodes[0] != BAD and nodes[1] == BAD:
                it.read(number)
        it.read_all()
        failures = it.stats()["failures"]
        log = (tmp_path / "map.log").read_text()
        blamed = log.count("event=node_wrong")
        assert blamed == log.count(f"node {BAD} of its ring") <= len(it.caches)
        if slices == "of a frame each":
            assert it.origin.requests == []
            assert blamed
            assert 0 < failures["wrong_answer"] <= 2 * len(it.caches)


@pytest.mark.parametrize("blamed", ["one after the other", "the same always"])
def test_a_front_that_is_wrong_itself_is_left(
    sanitized_build: Path, tmp_path: Path, blamed: str
) -> None:
    """Three wrong answers in a row are its fault, and one is said to be that of a
    node."""
    others = count()

    def lying(request: str) -> bytes:
        other = next(others) % NODES if blamed != "the same always" else 0
        return answer(request, bytes(len(DATA)), node=1 + other)

    with site(sanitized_build, tmp_path / "map", lying) as it:
        it.read_all()
        assert 0 < it.wrong() <= it.asked() <= 8
        assert 0 < len(it.origin.requests) <= UNITS


def test_a_front_that_blames_good_nodes_is_believed_once(
    sanitized_build: Path, tmp_path: Path
) -> None:
    """Even if it has the bytes right when it is asked again. The others are asked for
    all that their nodes have."""
    turns = count()

    def cunning(request: str) -> bytes:
        right = without(request) and next(turns) % 2 == 0
        node = 1 + next(turns) % NODES
        return answer(request, DATA if right else bytes(len(DATA)), node=node)

    with site(sanitized_build, tmp_path / "map", cunning, front, front) as it:
        it.read_all()
        assert it.origin.requests == []
        log = (tmp_path / "map.log").read_text()
        assert 0 < log.count("event=node_wrong") <= len(it.caches)
        for cache in it.caches[1:]:
            assert {without(one) for one in cache.requests} <= {0, BAD}


def test_where_all_are_wrong_the_origin_is_asked(
    sanitized_build: Path, tmp_path: Path
) -> None:
    def wrong(request: str) -> bytes:
        return answer(request, bytes(len(DATA)), node=1)

    with site(sanitized_build, tmp_path / "map", wrong, wrong, wrong) as it:
        it.read_all()
        assert 0 < len(it.origin.requests) <= UNITS
        assert it.wrong() <= it.asked() <= 6 * len(it.caches)


@pytest.mark.parametrize("count", [1, 2])
def test_a_prefetch_gets_past_two_bad_nodes(
    sanitized_build: Path, tmp_path: Path, count: int
) -> None:
    """It has few tries, and what a node is blamed for is none of them."""

    def two_bad(request: str) -> bytes:
        node = node_of(range_of(request)[0] // UNIT, without(request))
        data = DATA if node == 1 else bytes(len(DATA))
        return answer(request, data, node=node)

    path, cache = tmp_path / "map", tmp_path / "cache"
    with site(sanitized_build, path, *[two_bad] * count, cache=cache) as it:
        it.shell.map_request("prefetch-start")

        def prefetch() -> dict[str, Any]:
            found: dict[str, Any] = it.shell.stats()["lazy"][0]["prefetch"]
            return found

        wait_until(lambda: prefetch()["state"] != "running")
        assert prefetch()["failed_units"] == 0, prefetch()
        assert prefetch()["fetched_units"] == UNITS
        assert it.wrong()


@pytest.mark.parametrize("node", ["0", "-1", "1025", "9" * 30, "2 ", "two", ""])
def test_what_is_no_number_of_a_node(
    sanitized_build: Path, tmp_path: Path, node: str
) -> None:
    def wrong(request: str) -> bytes:
        said = answer(request, bytes(len(DATA)), node=1)
        return said.replace(b"Node: 1", b"Node: " + node.encode())

    with site(sanitized_build, tmp_path / "map", wrong) as it:
        it.read_all()
        assert it.wrong() <= 4
        asked = {without(one) for one in it.caches[0].requests}
        assert asked == ({0, 2} if node == "2 " else {0})
