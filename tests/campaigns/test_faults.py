"""The campaign of faults in a short form, and what of it is a failure; what the proxy
does to answers.
"""

from __future__ import annotations

import http.client
import json
import math
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fault_proxy import FAULTS, Fault, FaultProxy, Faults
from faults import problems_of
from support.needs import Need
from support.paths import PROJECT
from support.registry import REGISTRY
from support.web_servers import ScriptedServer, response, scripted_server

from btrfs_ublk.base.capabilities import FUSE, LOOP
from btrfs_ublk.bench.origin import NGINX
from btrfs_ublk.bench.report import Result

BODY = bytes(range(256)) * 40
#: What is cut off at once ends long before.
HANG_S = 3.0
TORTURE = PROJECT / "scripts/torture"
TIMEOUT_S = 280


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
        assert kind != "hang" or took_s >= HANG_S


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


def good(phase: str) -> Result:
    names = ("errors", "wrong_bytes", "hung", "other_errors")
    return {f"{phase}reads": 9} | {f"{phase}{name}": 0 for name in names}


GOOD: Result = {
    "faults": ["node", "rotting disk"],
    "seed": 7,
    "may_fail": True,
    "deadline_s": 6,
    "left": [],
    "well_s": 1.0,
    "max_s": 6.0,
    "stall_s": 0.1,
    **good(""),
    **good("healed_"),
    **good("again_"),
}


def test_what_of_a_round_is_a_failure() -> None:
    assert problems_of(GOOD | {"errors": 5}) == []
    for bad in (
        {"errors": 5, "may_fail": False},
        {"wrong_bytes": 1},
        {"other_errors": 1},
        {"hung": 1},
        {"reads": 0},
        {"healed_errors": 1},
        {"again_wrong_bytes": 1},
        {"well_s": math.inf},
        {"left": ["mount"]},
    ):
        (found,) = problems_of(GOOD | bad)
        assert found.startswith("node + rotting disk, seed 7: ")
        # Of a machine that had no CPU for it, times say nothing.
        counts = {"wrong_bytes", "other_errors", "again_wrong_bytes", "left"} & {*bad}
        assert bool(problems_of(GOOD | bad | {"stall_s": 3.0})) == bool(counts)


@pytest.mark.device
@pytest.mark.fuse
def test_sources_and_caches_fail_and_are_well_again(
    sparse_path: Path, need: Need
) -> None:
    need(FUSE, LOOP, NGINX, REGISTRY)
    pytest.importorskip("pyroute2", reason="pyroute2 makes networks")
    kinds = ["names", "rotting disk"]
    output = sparse_path / "results.json"
    # The first one's name leads to another address, and there is no other mirror.
    options = ["--seed=1", "--rounds=2", "--source=http", "--source=oci"]
    times = ["--duration=2", "--deadline=5", "--front-end=fuse"]
    done = subprocess.run(
        [
            *(TORTURE, "faults", *options, *times, *(f"--kind={x}" for x in kinds)),
            *("--directory", sparse_path, "-o", output),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    rounds = json.loads(output.read_text())["results"]
    assert all(kind in each["faults"] for kind, each in zip(kinds, rounds, strict=True))
    assert rounds[0]["how"] == ["moves"] and not rounds[0]["mirrored"]
