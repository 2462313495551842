"""Which of several mirrors is asked first: fetch-shell, in a sanitizer build."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.shells import FetchShell
from support.web_servers import (
    Script,
    ScriptedServer,
    ranged,
    response,
    scripted_server,
)

UNIT = 4096
UNITS = 64
DATA = b"".join(bytes([number]) * UNIT for number in range(UNITS))
#: Answers in a row, until others come first; and for how long, where that ends.
UNHEALTHY_FAILURES = 3
UNHEALTHY_S = 0.1


def good(request: str) -> bytes:
    return ranged(request, DATA)


def always(head: str) -> Script:
    return lambda _: response(head)


@dataclass
class Mirrors:
    """Of one source: `near` comes first in its list."""

    shell: FetchShell
    near: ScriptedServer
    far: ScriptedServer
    source: int

    def read(self, first: int, count: int) -> None:
        """Units, one after the other."""
        for at in range(first * UNIT, (first + count) * UNIT, UNIT):
            assert self.shell.read(self.source, at, UNIT).data == DATA[at : at + UNIT]

    def read_at_once(self, first: int, count: int, *, deadline_s: float) -> None:
        ats = range(first * UNIT, (first + count) * UNIT, UNIT)
        reads = {
            self.shell.begin(self.source, at, UNIT, deadline_s=deadline_s): at
            for at in ats
        }
        for number, answer in self.shell.finish().items():
            assert answer.data == DATA[reads[number] :][:UNIT]

    def asked(self) -> tuple[int, int]:
        """Requests since the last time."""
        counts = len(self.near.requests), len(self.far.requests)
        self.near.requests.clear()
        self.far.requests.clear()
        return counts


@contextmanager
def two_mirrors(
    build: Path, log: Path, unhealthy_s: float, *, silent_s: float = 600
) -> Iterator[Mirrors]:
    # Requests that follow one that is silent, as the machine is busy, would count.
    options = [f"unhealthy={round(unhealthy_s * 1000)}"]
    options.append(f"silent={round(silent_s * 1000)}")
    with (
        scripted_server(good) as near,
        scripted_server(good) as far,
        FetchShell(build, *options, log=log) as shell,
    ):
        keys = {"kind": "http", "proxy": "none"}
        places = [{**keys, "url": each.url()} for each in (near, far)]
        source = {"size": len(DATA), "unit": UNIT, "mirrors": places}
        yield Mirrors(shell, near, far, shell.add(source))


FAILURES = ["500 Internal Server Error", "200 OK", "404 Not Found"]


@pytest.mark.parametrize("failure", FAILURES)
def test_is_left_alone_while_it_fails(
    sanitized_build: Path, tmp_path: Path, failure: str
) -> None:
    with two_mirrors(sanitized_build, tmp_path / "log", 600) as mirrors:
        mirrors.near.script = always(failure)
        mirrors.read(0, 8)
        assert mirrors.asked() == (UNHEALTHY_FAILURES, 8)
        mirrors.near.script = good
        mirrors.read(8, 8)
        assert mirrors.asked() == (0, 8)


@pytest.mark.parametrize("failure", FAILURES)
def test_is_preferred_again_when_it_is_well(
    sanitized_build: Path, tmp_path: Path, failure: str
) -> None:
    with two_mirrors(sanitized_build, tmp_path / "log", UNHEALTHY_S) as mirrors:
        mirrors.near.script = always(failure)
        mirrors.read(0, 8)
        near, far = mirrors.asked()
        assert near >= UNHEALTHY_FAILURES and far == 8
        mirrors.near.script = good
        time.sleep(UNHEALTHY_S)
        mirrors.read(8, 8)
        assert mirrors.asked() == (8, 0)


def test_is_asked_when_others_fail(sanitized_build: Path, tmp_path: Path) -> None:
    with two_mirrors(sanitized_build, tmp_path / "log", 600) as mirrors:
        mirrors.near.script = always(FAILURES[0])
        mirrors.read(0, UNHEALTHY_FAILURES)
        mirrors.asked()
        mirrors.near.script = good
        mirrors.far.script = always("404 Not Found")
        mirrors.read(8, 1)
        assert mirrors.asked() == (1, 1)
