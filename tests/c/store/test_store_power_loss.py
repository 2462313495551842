"""A map whose machine loses power at any moment: what was acknowledged is there."""

import hashlib
import random
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from support.disks import SYNC, Operation, lay_out, logged_writes, read_log, some_states
from support.needs import share_of
from support.shells import StoreShell

pytestmark = pytest.mark.data

STATES_MIN = share_of(5_000, least_percent=5)
UNIT = 4096
MEMSET = {"kind": "memset", "size": 1 << 40, "byte": 7}
#: Its units are pinned as they come. Nobody reads it.
FILE = {"kind": "file", "path": "/nowhere", "size": 1 << 30, "unit": UNIT}


def listed(number: int) -> dict[str, Any]:
    """A source with digests: in several pages, so that they are no single write."""
    digests = [digest_of((number, unit)) for unit in range(300)]
    return FILE | {"path": f"/nowhere/{number}", "size": 300 * UNIT, "digests": digests}


def digest_of(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()


Row = tuple[int, int, int]


class Workload:
    """Random requests, and what the answers to them promise."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.answers = 0
        self.batches: list[frozenset[int]] = []
        #: Of each batch, and each pin, after which answer it must be there.
        self.batch_since: list[int] = []
        self.pin_since: dict[int, int] = {}
        self.listed: dict[int, int] = {}

    def ask(self, shell: StoreShell, **command: Any) -> None:
        reply = shell.ask(**command)
        assert "error" not in reply, reply
        self.answers += 1

    def add(self, shell: StoreShell, sources: list[dict[str, Any]], count: int) -> None:
        free = 4096 * 1000 * (len(self.batches) + 1)
        offsets = frozenset(free + 4096 * 2 * number for number in range(count))
        rows = [[offset, 4096, len(sources) - 1, 0] for offset in sorted(offsets)]
        self.batches.append(offsets)
        self.ask(shell, add=rows, sources=sources)
        self.batch_since.append(self.answers)

    def run(self, shell: StoreShell, requests: int) -> None:
        self.answers += 1  # that it is open
        if not self.batches:
            self.add(shell, [FILE], 1)
        for _ in range(requests):
            what = self.source.choices(
                ["add", "listed", "pin", "checkpoint"], [4, 1, 6, 1]
            )[0]
            if what == "add":
                self.add(shell, [MEMSET], self.source.randrange(1, 100))
            elif what == "listed":
                number = len(self.batches)
                self.add(shell, [listed(number)], 1)
                self.listed[next(iter(self.batches[-1]))] = number
            elif what == "pin":
                unit = self.source.randrange(200)
                self.ask(shell, pin=[1, unit, digest_of(unit)])
                self.pin_since.setdefault(unit, self.answers)
            else:
                self.ask(shell, checkpoint=True)


def record(
    build: Path, tmp_path: Path, slice_bytes: int
) -> tuple[list[Operation], Workload]:
    directory, log = tmp_path / "recorded", tmp_path / "log"
    directory.mkdir(mode=0o700)
    workload = Workload(6)
    environment = logged_writes(build, log, directory)
    environment["STORE_SLICE_BYTES"] = str(slice_bytes)
    for kill in (False, True, False):  # each finds what the one before it has left
        with StoreShell(build, directory / "it.map", environment) as shell:
            workload.run(shell, 20)
            if kill:
                shell.kill()
    return read_log(log), workload


def check(shell: StoreShell, workload: Workload, answers: int) -> int:
    """How many mappings there are; those that must be, are, and no part of a batch."""
    rows = {offset: source for offset, _, source, _ in shell.list()}
    for number, batch in enumerate(workload.batches):
        found = len(batch & rows.keys())
        promised = (
            number < len(workload.batch_since)
            and workload.batch_since[number] <= answers
        )
        assert found == len(batch) or (not found and not promised), number
    assert rows.keys() <= frozenset().union(*workload.batches)
    if rows:
        for unit, since in workload.pin_since.items():
            digest = shell.ask(digest=[1, unit])["digest"]
            assert digest == digest_of(unit) or (digest is None and since > answers)
    for offset, number in workload.listed.items():
        if offset in rows:
            assert shell.ask(check_digests=rows[offset]) == {"ok": True}
    return len(rows)


@pytest.mark.parametrize("slice_bytes", [1 << 20, 1000], ids=["one", "slices"])
def test_what_was_acknowledged_is_there(
    sanitized_build: Path, tmp_path: Path, slice_bytes: int
) -> None:
    operations, workload = record(sanitized_build, tmp_path, slice_bytes)
    assert sum(operation.kind == SYNC for operation in operations) > 40
    assert len(workload.pin_since) > 15 and workload.listed
    places = cycle([tmp_path / "one", tmp_path / "other"])
    checked = present = 0
    with StoreShell(sanitized_build, tmp_path / "none.map") as shell:
        for state in some_states(operations, least=STATES_MIN, seed=7):
            lost = next(places)  # the map in the other one is still open
            lay_out(state, lost)
            for path in lost.iterdir():
                path.chmod(0o600)
            opened = shell.ask(reopen=str(lost / "it.map"))
            assert "error" not in opened, (state, opened)
            present += check(shell, workload, state.answers)
            checked += 1
    assert checked >= STATES_MIN
    assert present > 10 * checked  # most states hold much
