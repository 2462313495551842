"""What the campaign of faults calls good, and one cell of its matrix; what the proxy
does to answers.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from conftest import Need
from fault_proxy import FAULTS, Fault, FaultProxy, Faults
from fault_tables import is_good, tables
from faults import Case, bed, measure
from scripted_server import ScriptedServer, response, scripted_server

from btrfs_ublk.base.capabilities import FUSE, LOOP
from btrfs_ublk.bench.origin import NGINX
from btrfs_ublk.bench.report import Result
from btrfs_ublk.units import MIB

BODY = bytes(range(256)) * 40
#: What is cut off at once ends long before.
HANG_S = 3.0


@pytest.fixture
def upstream() -> Iterator[ScriptedServer]:
    answer = response("206 P\nContent-Range: bytes 0-10239/20000", BODY)
    with scripted_server(lambda _: answer) as server:
        yield server


def ask(proxy: FaultProxy) -> tuple[int, bytes]:
    """Raises HTTPException or OSError for what is no answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)) as to:
        to.request("GET", "/object")
        answer = to.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize("kind", FAULTS)
def test_the_proxy_spoils_what_it_should(upstream: ScriptedServer, kind: Fault) -> None:
    faults = Faults(kind, 1.0, delay_s=0.3, hang_s=HANG_S)
    with FaultProxy(("127.0.0.1", upstream.port), faults=faults) as proxy:
        start = time.monotonic()
        seen: object
        try:
            seen = ask(proxy)
        except (OSError, http.client.HTTPException) as error:
            seen = type(error)
        took_s = time.monotonic() - start
        assert proxy.counts.injected == {kind: 1}
        proxy.heal()
        assert ask(proxy) == (206, BODY)
        assert proxy.counts.injected == {kind: 1}
    if kind == "error-503":
        assert seen == (503, b"sorry")
    elif kind == "wrong-length":
        assert seen == (206, BODY[:-512])
    elif kind == "corrupt":
        assert isinstance(seen, tuple)
        changed = [a ^ b for a, b in zip(seen[1], BODY, strict=True) if a != b]
        assert changed == [0x10]
    elif kind == "delay":
        assert seen == (206, BODY) and took_s >= 0.3
    else:
        expected = {
            "reset": ConnectionResetError,
            "short": http.client.IncompleteRead,
            "hang": http.client.IncompleteRead,
        }
        assert seen is expected[kind]
        assert (took_s >= HANG_S) == (kind == "hang")


def test_the_proxy_spoils_a_share_the_same_each_time(upstream: ScriptedServer) -> None:
    counts = []
    for _ in range(2):
        faults = Faults("error-503", 0.25)
        address = ("127.0.0.1", upstream.port)
        with FaultProxy(address, faults=faults, seed=3) as proxy:
            statuses = [ask(proxy)[0] for _ in range(60)]
        counts.append(statuses)
        assert 8 <= statuses.count(503) <= 22
    assert counts[0] == counts[1]


GOOD: Result = {
    "fault": "reset",
    "share": 0.1,
    "mode": "direct",
    "injected": 5,
    "reads": 1000,
    "errors": 3,
    "other_errors": 0,
    "wrong_bytes": 0,
    "late": 0,
    "max_s": 1.5,
    "well_s": 0.1,
    "healed_reads": 50,
    "healed_errors": 0,
}


def test_a_row_says_whether_it_is_good() -> None:
    bad = GOOD | {"wrong_bytes": 1}
    document = {"parameters": {"deadline_s": 2}, "results": [GOOD, bad]}
    (table,) = tables(document)
    assert [row[:5] for row in table.rows] == [
        ("reset", "direct", "10%", "5", "1,000")
    ] * 2
    assert [row[-1] for row in table.rows] == ["yes", "NO"]


@pytest.mark.parametrize(
    "name", ["wrong_bytes", "other_errors", "late", "healed_errors"]
)
def test_what_is_not_good(name: str) -> None:
    assert is_good(GOOD)
    assert not is_good(GOOD | {name: 1})
    assert not is_good(GOOD | {"healed_reads": 0})


#: Times are measured here, and not those of an emulated machine.
@pytest.mark.native
@pytest.mark.fuse
@pytest.mark.parametrize(
    ("fault", "share", "mode"), [("corrupt", 0.3, "direct"), ("reset", 1.0, "mmap")]
)
def test_a_device_has_its_errors_and_is_well_again(
    sparse_path: Path,
    need: Need,
    fault: Fault,
    share: float,
    mode: str,
) -> None:
    need(FUSE, LOOP, NGINX)
    deadline_s = 2
    with bed(
        sparse_path, size_bytes=32 * MIB, deadline_s=deadline_s, front_end="fuse"
    ) as place:
        case = Case(fault, share, mode)
        result = measure(place, case, duration_s=1, deadline_s=deadline_s)
    assert is_good(result), result
    assert result["injected"] > 0
    if share == 1.0:
        assert result["errors"] > 0
