"""A cache whose machine loses power at any moment: units are right, or absent."""

import random
from itertools import cycle
from pathlib import Path

import pytest
from support.disks import SYNC, Operation, lay_out, logged_writes, read_log, some_states
from support.needs import share_of
from support.shells import CacheShell

from btrfs_ublk.units import KIB

pytestmark = pytest.mark.data

#: Size and unit of each source; the last unit of the first is short.
SOURCES = [(24 * 4 * KIB - 1000, 4 * KIB), (6 * 16 * KIB, 16 * KIB)]
#: Over both limits.
STATES_MIN = share_of(5_000, least_percent=5)


def unit_count(index: int) -> int:
    size, unit_bytes = SOURCES[index]
    return -(-size // unit_bytes)


def open_all(shell: CacheShell) -> None:
    for index, (size, unit_bytes) in enumerate(SOURCES):
        assert shell.open(index, size, unit_bytes) == "ok"


class Workload:
    """Random requests, and after which answers which units must be there."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.answers = 0
        #: What a sync has promised, by the number of answers at which it held.
        self.promised: dict[int, set[tuple[int, int]]] = {0: set()}
        self.put: set[tuple[int, int]] = set()

    def run(self, shell: CacheShell, requests: int, *, evicts: bool) -> None:
        open_all(shell)
        self.answers += len(SOURCES)
        for _ in range(requests):
            index = self.source.randrange(len(SOURCES))
            unit = self.source.randrange(unit_count(index))
            what = self.source.choices(["put", "drop", "sync"], [8, 2, 1])[0]
            if what == "drop":
                # NB: as soon as it is asked for, it may be gone.
                self.promise(self.promises() - {(index, unit)})
                self.put.discard((index, unit))
            answer = shell.line(*([what] if what == "sync" else [what, index, unit]))
            assert answer == "ok"
            self.answers += 1
            if what == "put" and not evicts:
                self.put.add((index, unit))
            elif what == "sync":
                self.promise(set(self.put))

    def promises(self) -> set[tuple[int, int]]:
        return self.promised[max(self.promised)]

    def promise(self, units: set[tuple[int, int]]) -> None:
        self.promised[self.answers] = units

    def promised_after(self, answers: int) -> set[tuple[int, int]]:
        """What holds from the first moment of that number of answers to its last."""
        at = max(number for number in self.promised if number <= answers)
        return self.promised[at]


def record(
    build: Path, tmp_path: Path, *, max_bytes: int, requests: int, seed: int
) -> tuple[list[Operation], Workload]:
    directory, log = tmp_path / "cache", tmp_path / "log"
    directory.mkdir(mode=0o700)
    workload = Workload(seed)
    environment = logged_writes(build, log, directory)
    for _ in range(2):  # the second one finds what the first one has made
        with CacheShell(
            build, directory, max_bytes=max_bytes, environment=environment
        ) as shell:
            workload.run(shell, requests, evicts=bool(max_bytes))
    return read_log(log), workload


@pytest.mark.parametrize("max_bytes", [0, 100 * KIB])
def test_units_are_right_or_absent(
    sanitized_build: Path, tmp_path: Path, max_bytes: int
) -> None:
    operations, workload = record(
        sanitized_build, tmp_path, max_bytes=max_bytes, requests=75, seed=6
    )
    assert sum(operation.kind == SYNC for operation in operations) > 20
    places = cycle([tmp_path / "one", tmp_path / "other"])
    checked = present = 0
    with CacheShell(sanitized_build, tmp_path / "none") as shell:
        for state in some_states(operations, least=STATES_MIN // 2, seed=6):
            lost = next(places)  # the cache in the other one is still open
            if checked % 20:
                state.files.pop("state", None)  # 1 MiB that nobody believes
            lay_out(state, lost)
            assert shell.line("reopen", lost) == "ok"
            open_all(shell)
            found = set()
            for index in range(len(SOURCES)):
                letters = shell.line("check", index)
                assert set(letters) <= {"o", "m"}, (state, index, letters)
                found |= {(index, unit) for unit, o in enumerate(letters) if o == "o"}
            assert found >= workload.promised_after(state.answers), state
            checked += 1
            present += len(found)
    assert checked >= STATES_MIN // 2
    assert present > checked  # most states hold something
