"""The cache against a model, with two processes that come, go and are killed."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.needs import share_of
from support.shells import HEADER_BYTES, CacheShell, key_of

from btrfs_ublk.units import KIB

pytestmark = pytest.mark.data

#: Size and unit; two groups of units in the first, a short last unit in both.
SOURCES = [(460 * 4 * KIB - 5, 4 * KIB), (5 * 64 * KIB + 1, 64 * KIB)]
PLACES = [(0, unit) for unit in (0, 1, 2, 446, 447, 448, 459)]
PLACES += [(1, unit) for unit in range(6)]
STEPS = share_of(20_000, least_percent=5)
STEPS_EACH = 50

places = st.sampled_from(PLACES)
processes = st.sampled_from([0, 1])


class CacheMachine(RuleBasedStateMachine):
    """``durable`` must be readable by all, ``written`` by the process that has put it;
    the others may be, where they were ever put.
    """

    build: Path

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.shells: list[CacheShell] = []
        self.written: list[set[tuple[int, int]]] = [set(), set()]
        self.durable: set[tuple[int, int]] = set()
        self.possible: set[tuple[int, int]] = set()
        #: Written to by somebody else, and not dropped since: right, or no hit.
        self.spoiled: set[tuple[int, int]] = set()

    def _start(self) -> CacheShell:
        shell = CacheShell(self.build, Path(self.directory.name))
        for index, (size, unit_bytes) in enumerate(SOURCES):
            assert shell.open(index, size, unit_bytes) == "ok"
        return shell

    @initialize()
    def begin(self) -> None:
        self.shells = [self._start(), self._start()]

    @rule(which=processes, place=places)
    def put(self, which: int, place: tuple[int, int]) -> None:
        self.possible.add(place)
        assert self.shells[which].line("put", *place) == "ok"
        self.written[which].add(place)

    @rule(which=processes, place=places)
    def read(self, which: int, place: tuple[int, int]) -> None:
        answer = self.shells[which].line("read", *place, place[1])
        if place in self.spoiled:
            assert answer in ("ok", "rotten", "miss", "changed"), place
        elif place in self.durable | self.written[which]:
            assert answer == "ok", place
        elif place in self.possible:
            assert answer in ("ok", "miss", "changed"), place
        else:
            assert answer == "miss", place

    @rule(which=processes, place=places)
    def drop(self, which: int, place: tuple[int, int]) -> None:
        assert self.shells[which].line("drop", *place) == "ok"
        # NB: what the other one has on its way may come after that.
        if place not in self.written[1 - which]:
            self.possible.discard(place)
        self._forget({place})
        self.spoiled.discard(place)

    @rule(place=places, byte=st.integers(0, 4096 + 63))
    def spoil(self, place: tuple[int, int], byte: int) -> None:
        """A byte of the unit's first block, or of the sums about it."""
        index, unit = place
        size, unit_bytes = SOURCES[index]
        at = unit * unit_bytes + byte
        if byte >= 4096:
            data_bytes = -(-size // 4096) * 4096
            sums_at = -(-(data_bytes + HEADER_BYTES) // (64 * KIB)) * 64 * KIB
            at = sums_at + unit * unit_bytes // 4096 * 4 // 64 * 64 + byte - 4096
            near = at - sums_at
            if near >= data_bytes // 4096 * 4:
                return
            block = near // 4
            self.spoiled.add((index, block * 4096 // unit_bytes))
        elif at >= size:
            return
        self.spoiled.add(place)
        path = Path(self.directory.name) / f"{key_of(index)}.data"
        with path.open("r+b") as file:
            file.seek(at)
            found = file.read(1)[0]
            file.seek(at)
            file.write(bytes([found ^ 0x10]))

    @rule(which=processes)
    def sync(self, which: int) -> None:
        assert self.shells[which].line("sync") == "ok"
        self.durable |= self.written[which]
        self.written[which] = set()

    @rule(which=processes)
    def evict_all(self, which: int) -> None:
        assert self.shells[which].line("shrink 0") in ("ok", "error 28")
        self._forget(set(PLACES))

    @rule(which=processes)
    def reopen(self, which: int) -> None:
        self.shells[which].close()
        self.shells[which] = self._start()
        self.durable |= self.written[which]
        self.written[which] = set()

    @rule(which=processes)
    def kill(self, which: int) -> None:
        self.shells[which].kill()
        self.shells[which] = self._start()
        self.written[which] = set()

    @precondition(lambda self: bool(self.shells))
    @invariant()
    def counts_what_is_there(self) -> None:
        if self.durable:
            assert self.shells[0].stats()["bytes"] > 0

    def _forget(self, gone: set[tuple[int, int]]) -> None:
        self.durable -= gone
        for written in self.written:
            written -= gone

    def teardown(self) -> None:
        for shell in self.shells:
            shell.kill()
        self.directory.cleanup()


def test_model(sanitized_build: Path) -> None:
    machine = type("Machine", (CacheMachine,), {"build": sanitized_build})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=STEPS // STEPS_EACH, stateful_step_count=STEPS_EACH
        ),
    )
