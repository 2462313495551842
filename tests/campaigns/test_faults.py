"""What of the campaign of faults is a failure, and what its server does to answers."""

import http.client
import math
import time
from contextlib import closing

import pytest
from faults import problems_of
from spoiling_server import FAULTS, Fault, Faults, SpoilingServer

from btrfs_ublk.bench.report import Result

BODY = bytes(range(256)) * 40
#: What is cut off at once ends long before.
HANG_S = 3.0


@pytest.mark.parametrize("kind", FAULTS)
def test_the_server_spoils_what_it_should(kind: Fault) -> None:
    def ask(server: SpoilingServer) -> tuple[int, bytes]:
        to = http.client.HTTPConnection(*server.server_address, timeout=30)
        with closing(to):
            to.request("GET", "/object", headers={"Range": "bytes=0-10239"})
            answer = to.getresponse()
            return answer.status, answer.read()

    with SpoilingServer(BODY * 2) as server:
        server.faults = Faults(kind, 1.0, delay_s=0.3, hang_s=HANG_S)
        start = time.monotonic()
        seen: object
        try:
            seen = ask(server)
        except (OSError, http.client.HTTPException) as error:
            seen = type(error)
        took_s = time.monotonic() - start
        server.faults = Faults()
        assert ask(server) == (206, BODY)
        assert server.injected == {kind: 1}
    corrupt = bytearray(BODY)
    corrupt[len(BODY) // 3] ^= 0x10
    expected = {
        "error-503": (503, b"sorry"),
        "wrong-length": (206, BODY[:-512]),
        "corrupt": (206, bytes(corrupt)),
        "delay": (206, BODY),
        "reset": ConnectionResetError,
    }
    assert seen == expected.get(kind, http.client.IncompleteRead)
    assert took_s >= {"delay": 0.3, "hang": HANG_S}.get(kind, 0)


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
