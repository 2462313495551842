"""Background completion: what a map names comes into the cache by itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.shells import EngineShell, describe
from support.waiting import wait_until
from support.web_servers import (
    ORIGIN_BYTES,
    ORIGIN_DATA,
    ORIGIN_UNIT,
    ORIGIN_UNITS,
    Origin,
    ScriptedServer,
    origin_source,
    scripted_server,
)

from btrfs_ublk.content.completion import Completion

#: PREFETCH_AT_ONCE_DEFAULT in csrc/lazy/prefetch.h.
AT_ONCE = 32


@pytest.fixture
def origin() -> Origin:
    return Origin()


@pytest.fixture
def web(origin: Origin) -> Iterator[ScriptedServer]:
    with scripted_server(origin) as server:
        yield server
        origin.go_on.set()


def described(tmp_path: Path, complete: int | str = 1 << 40) -> dict[str, Any]:
    """Describe a device that is completed; by default as fast as it can be."""
    return describe(
        {
            "kind": "lazy",
            "length": ORIGIN_BYTES,
            "map": str(tmp_path / "map"),
            "cache": str(tmp_path / "cache"),
            "complete": complete,
        }
    )


def add(shell: EngineShell, web: ScriptedServer, *mappings: tuple[int, int]) -> None:
    """Map pieces of the source, each (offset, length), where they are in it."""
    pieces = mappings or ((0, ORIGIN_BYTES),)
    reply = shell.map_request(
        "map-add",
        sources=[origin_source(web.url())],
        mappings=[[at, length, 0, at] for at, length in pieces],
    )
    assert "error" not in reply, reply


def state(shell: EngineShell) -> Completion:
    found = Completion.parse(shell.stats()["lazy"][0]["complete"])
    assert found is not None
    return found


def until(shell: EngineShell, *states: str) -> Completion:
    wait_until(lambda: state(shell).state in states)
    return state(shell)


@pytest.mark.parametrize("complete", [1 << 40, "idle"])
def test_all_comes_and_the_server_is_not_needed_any_more(
    sanitized_build: Path, tmp_path: Path, origin: Origin, complete: int | str
) -> None:
    with scripted_server(origin) as web:
        with EngineShell(sanitized_build, described(tmp_path, complete)) as shell:
            add(shell, web)
            wait_until(lambda: state(shell).done_units == ORIGIN_UNITS)
            done = until(shell, "done")
            assert (done.units, done.bytes, done.done_bytes) == (
                ORIGIN_UNITS,
                ORIGIN_BYTES,
                ORIGIN_BYTES,
            )
            assert done.fetched_bytes == ORIGIN_BYTES and not done.failed_units
    # In the order of the virtual data, but for those that are under way at a time.
    assert sorted(origin.asked) == list(range(ORIGIN_UNITS))
    assert all(abs(unit - i) < AT_ONCE for i, unit in enumerate(origin.asked))
    with EngineShell(sanitized_build, described(tmp_path, complete)) as shell:
        assert until(shell, "done").fetched_bytes == 0
        for at in range(0, ORIGIN_BYTES, ORIGIN_UNIT):
            assert (
                shell.request(f"read {at} {ORIGIN_UNIT}")
                == ORIGIN_DATA[at : at + ORIGIN_UNIT]
            )


@pytest.mark.data
def test_goes_on_after_a_kill(
    sanitized_build: Path, tmp_path: Path, origin: Origin, web: ScriptedServer
) -> None:
    """What the cache has is not fetched again."""
    origin.delay_s = 0.02
    with EngineShell(sanitized_build, described(tmp_path, 8 * ORIGIN_UNIT)) as shell:
        add(shell, web)
        wait_until(lambda: len(origin.asked) >= 12)
        # Units are durable a moment after they are put in.
        wait_until(lambda: state(shell).done_units >= 8)
        shell.map_request("map-stats")
    before = len(origin.asked)
    with EngineShell(sanitized_build, described(tmp_path)) as shell:
        assert until(shell, "done").done_units == ORIGIN_UNITS
    assert len(origin.asked) - before <= ORIGIN_UNITS - 8
