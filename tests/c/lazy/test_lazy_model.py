"""Lazy segments against a model: whatever was readable reads the same for ever.

A server's engine is read from, mapped to, killed and started again, while its cache is
evicted from, and while what its sources are served from changes, goes and comes back.
"""

import errno
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from support.needs import Need, share_of
from support.shells import CacheShell, EngineShell, describe, root_of, units_of
from support.waiting import wait_until
from support.web_servers import NGINX, WebServer, web_server

pytestmark = pytest.mark.data

STEPS = share_of(20_000, least_percent=5)
STEPS_EACH = 200

BLOCK = 4096
UNIT = 2 * BLOCK
#: The last unit of a source, and its last block, are short.
SOURCE_BYTES = 8 * UNIT - BLOCK - 1000
SOURCE_BLOCKS = -(-SOURCE_BYTES // BLOCK)
#: A slot of the virtual data takes one mapping, and has holes after it.
SLOT_BLOCKS = 20
SLOTS = 12
SIZE = SLOTS * SLOT_BLOCKS * BLOCK
#: What fails, fails by then; what is well is asked for again for so long.
DEADLINE_S = 0.1
PATIENCE_S = 20.0

KINDS = ("memset", "file", "file+digests", "http", "http+digests")

numbers = st.integers(0, 1 << 16)
blocks = st.integers(0, SLOTS * SLOT_BLOCKS - 1)


#: Of a second each, as the ETags of nginx are.
FIRST_MTIME_S = 1_700_000_000

CHANGES = ("rewrite", "rewrite_unseen", "replace", "cut", "restore", "go", "come_back")


class ChangingFile:
    """``versions`` has the contents that it has had as a whole, the right one first."""

    def __init__(self, path: Path, size_bytes: int, draw: random.Random) -> None:
        self.path = path
        self._away = path.with_name(path.name + ".away")
        self._draw = draw
        self._mtime_s = FIRST_MTIME_S
        self.versions = [draw.randbytes(size_bytes)]
        #: It never was anything else, whether it is there or not.
        self.is_unchanged = True
        path.write_bytes(self.versions[0])
        self._stamp(path)

    @property
    def is_there(self) -> bool:
        return self.path.exists()

    def _stamp(self, path: Path) -> None:
        os.utime(path, (self._mtime_s, self._mtime_s))

    def _now(self) -> Path:
        return self.path if self.is_there else self._away

    def _write(self, content: bytes) -> None:
        """As a whole, in its place: the same inode."""
        file = os.open(self._now(), os.O_WRONLY)
        try:
            assert os.pwrite(file, content, 0) == len(content)
            os.ftruncate(file, len(content))
        finally:
            os.close(file)
        self.is_unchanged = False
        self._stamp(self._now())

    def _new_version(self) -> bytes:
        self.versions.append(self._draw.randbytes(len(self.versions[0])))
        return self.versions[-1]

    def rewrite(self) -> None:
        self._mtime_s += 1
        self._write(self._new_version())

    def rewrite_unseen(self) -> None:
        """Other content with the size, the inode and the mtime of what was there."""
        self._write(self._new_version())

    def replace(self) -> None:
        """By another file."""
        other = self.path.with_name(self.path.name + ".new")
        other.write_bytes(self._new_version())
        self._mtime_s += 1
        self._stamp(other)
        other.rename(self._now())
        self.is_unchanged = False

    def cut(self) -> None:
        """In the midst of a block."""
        self._mtime_s += 1
        content = self._now().read_bytes()
        self._write(content[: len(content) // 2 + 7])

    def restore(self) -> None:
        """To what it was at first, as far as anybody can see."""
        self._mtime_s = FIRST_MTIME_S
        self._write(self.versions[0])

    def go(self) -> None:
        if self.is_there:
            self.path.rename(self._away)

    def come_back(self) -> None:
        if not self.is_there:
            self._away.rename(self.path)


@dataclass(frozen=True, eq=False)
class Source:
    """``file`` None: computed."""

    description: dict[str, Any]
    file: ChangingFile | None
    is_remote: bool

    def contents(self) -> list[bytes]:
        """All that it may rightly be."""
        if self.file is None:
            return [bytes([self.description["byte"]]) * SOURCE_BYTES]
        return self.file.versions[: 1 if "digests" in self.description else None]

    def block(self, content: bytes, number: int) -> bytes:
        return content[number * BLOCK :][:BLOCK].ljust(BLOCK, b"\0")


#: Source and block of it.
Place = tuple[int, int]


class LazyMachine(RuleBasedStateMachine):
    build: Path
    web: WebServer
    steps: Counter[str]
    answers: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.files = Path(tempfile.mkdtemp(dir=self.web.files))
        self.draw = random.Random(5)
        self.sources: list[Source] = []
        self.mappings: list[list[int]] = []  # rows: offset, length, source, its offset
        self.mapped: dict[int, Place] = {}
        self.seen: dict[Place, bytes] = {}
        self.remote_is_well = True
        self.engine: EngineShell | None = None
        self.pruner: CacheShell | None = None

    @initialize(cap=st.sampled_from([0, 5 * UNIT]), kinds=st.permutations(KINDS))
    def begin(self, cap: int, kinds: list[str]) -> None:
        cache = self.directory / "cache"
        self.pruner = CacheShell(self.build, cache)
        assert self.pruner.line("stats")
        limits = json.dumps({"version": 1, "max_bytes": cap, "reserve_bytes": 1})
        (cache / "limits").write_text(limits)
        (cache / "limits").chmod(0o600)
        paths = {"map": str(self.directory / "map"), "cache": str(cache)}
        lazy = {"kind": "lazy", "length": SIZE, "deadline_s": DEADLINE_S} | paths
        self.description = describe(lazy)
        self.engine = EngineShell(self.build, self.description)
        for slot, kind in enumerate(kinds):
            self._add(kind, slot, 0, SOURCE_BLOCKS)

    # --- mappings

    def _new_source(self, kind: str) -> Source:
        name = f"{len(self.sources)}"
        description: dict[str, Any] = {"size": SOURCE_BYTES, "unit": UNIT}
        kind, _, digests = kind.partition("+")
        description["kind"] = kind
        if kind == "memset":
            description["byte"] = len(self.sources) % 256
            return Source(description, None, is_remote=False)
        file = ChangingFile(self.files / name, SOURCE_BYTES, self.draw)
        if kind == "file":
            description["path"] = str(file.path)
        else:
            path = file.path.relative_to(self.web.root)
            description["url"] = self.web.url(str(path))
            # Else the system's are read first, a hundred of them.
            description["ca_file"] = str(self.web.ca)
        if digests:
            units = units_of(file.versions[0], UNIT)
            description["digests"] = [unit.hex() for unit in units]
            description["root"] = root_of(
                units, size_bytes=SOURCE_BYTES, unit_bytes=UNIT
            )
        return Source(description, file, is_remote=kind == "http")

    def _ask_for(self, row: list[int], source: Source) -> Any:
        assert self.engine is not None
        offset, length, _, source_offset = row
        return self.engine.map_request(
            "map-add",
            sources=[source.description],
            mappings=[[offset, length, 0, source_offset]],
        )

    def _add(self, kind: str, slot: int, first: int, count: int) -> None:
        start = slot * SLOT_BLOCKS
        source = self._new_source(kind)
        number = len(self.sources)
        row = [start * BLOCK, count * BLOCK, number, first * BLOCK]
        answer = self._ask_for(row, source)
        assert answer["map-add"]["added"] == [[row[0], False, row[1]]], answer
        self.sources.append(source)
        self.mappings.append(row)
        for block in range(count):
            self.mapped[start + block] = (number, first + block)

    @rule(kind=st.sampled_from(KINDS), slot=st.integers(0, SLOTS - 1), first=numbers)
    def add(self, kind: str, slot: int, first: int) -> None:
        """Or, where something is mapped, ask for something else there."""
        if slot * SLOT_BLOCKS in self.mapped:
            self._is_refused(slot * SLOT_BLOCKS, kind, 1 + first % SOURCE_BLOCKS)
            return
        self.steps["add"] += 1
        first %= SOURCE_BLOCKS
        count = (SOURCE_BLOCKS - first) // (1 + first % 2)
        self._add(kind, slot, first, max(1, count))

    @rule(which=numbers, kind=st.sampled_from((*KINDS, "the same")))
    def add_again(self, which: int, kind: str) -> None:
        """As after an answer that was lost, the same changes nothing; something else is
        refused, where it begins in the midst of a mapping as well.
        """
        if kind != "the same":
            mapped = list(self.mapped)
            self._is_refused(mapped[which % len(mapped)], kind, 1 + which % 5)
            return
        self.steps["add again"] += 1
        row = self.mappings[which % len(self.mappings)]
        answer = self._ask_for(row, self.sources[row[2]])
        assert answer["map-add"]["added"] == [[row[0], True, row[1]]], answer

    def _is_refused(self, block: int, kind: str, count: int) -> None:
        """Other content where there is some: the one in the way is named."""
        self.steps["remap"] += 1
        row = [block * BLOCK, count * BLOCK, -1, 0]
        source = self._new_source("file+digests" if kind == "memset" else kind)
        answer = self._ask_for(row, source)
        assert answer.get("errno") == "EEXIST", answer
        in_the_way = [x for x in self.mappings if x[0] < row[0] + row[1]]
        assert str(max(x[0] for x in in_the_way)) in answer["error"], answer

    # --- reads

    @rule(which=numbers)
    def read_one(self, which: int) -> None:
        self.steps["read"] += 1
        mapped = list(self.mapped)
        self._read(mapped[which % len(mapped)], 1)

    @rule(which=numbers)
    def read_what_was_read(self, which: int) -> None:
        self.steps["read again"] += 1
        seen = [block for block, place in self.mapped.items() if place in self.seen]
        if seen:
            self._read(seen[which % len(seen)], 1)

    @rule(block=blocks, count=st.integers(1, 24))
    def read_some(self, block: int, count: int) -> None:
        """Holes as well."""
        self.steps["read some"] += 1
        self._read(block, min(count, SLOTS * SLOT_BLOCKS - block))

    @rule(slot=st.integers(0, SLOTS - 1))
    def read_in_order(self, slot: int) -> None:
        """What comes next is fetched before."""
        self.steps["read in order"] += 1
        for block in range(0, SOURCE_BLOCKS, 3):
            self._read(slot * SLOT_BLOCKS + block, 1)

    def _read(self, block: int, count: int) -> None:
        assert self.engine is not None
        places = [self.mapped.get(at) for at in range(block, block + count)]
        line = f"read {block * BLOCK} {count * BLOCK}"
        answer = self.engine.request(line)
        known = [place for place in places if place is not None]
        end = time.monotonic() + PATIENCE_S
        while answer == errno.EIO and len(known) == count and self._is_well(known):
            assert time.monotonic() < end, (places, self.engine.stats())
            answer = self.engine.request(line)
        self.answers["bytes" if isinstance(answer, bytes) else "EIO"] += 1
        if not isinstance(answer, bytes):
            assert answer == errno.EIO
            return
        assert len(known) == count, "what is not mapped was read"
        for number, place in enumerate(known):
            self._check(place, answer[number * BLOCK : (number + 1) * BLOCK])

    def _is_well(self, places: list[Place]) -> bool:
        """Nothing has happened to the sources, so no read may fail."""
        for number in {number for number, _ in places}:
            source = self.sources[number]
            if source.is_remote and not self.remote_is_well:
                return False
            if source.file and not (source.file.is_there and source.file.is_unchanged):
                return False
        return True

    def _check(self, place: Place, found: bytes) -> None:
        number, block = place
        assert found == self.seen.setdefault(place, found), f"{place} is another"
        source = self.sources[number]
        # A unit is of one version, whichever block of it was read first.
        first = block - block % (UNIT // BLOCK)
        together = [(number, first + n) for n in range(UNIT // BLOCK)]
        assert any(
            all(
                self.seen.get(each, right) == right
                for each in together
                for right in [source.block(content, each[1])]
            )
            for content in source.contents()
        ), f"{place} is what its source never was"

    # --- what happens to them

    @rule(which=numbers, how=st.sampled_from(CHANGES))
    def change(self, which: int, how: str) -> None:
        found = [x for x in self.sources if x.file is not None]
        source = found[which % len(found)]
        assert source.file is not None
        self.steps[how] += 1
        # Half of one version and half of the other is none.
        self._settle()
        getattr(source.file, how)()
        if source.is_remote:
            self.remote_is_well = False

    def _settle(self) -> None:
        """Until nothing is on its way from the sources or to the cache."""
        assert self.engine is not None
        stats = self.engine.stats

        def is_at_rest() -> bool:
            lazy = stats()["lazy"][0]
            under_way = [lazy["fetcher"][f"units_{x}"] for x in ("queued", "in_flight")]
            return not any(under_way) and not lazy["cache"]["pending_units"]

        wait_until(is_at_rest, stats, timeout_s=PATIENCE_S)

    @rule(units=st.sampled_from([0, 0, 1, 4]), settled=st.booleans())
    def evict(self, units: int, settled: bool) -> None:
        self.steps["evict"] += 1
        assert self.pruner is not None
        if settled:
            self._settle()
        answer = self.pruner.line("shrink", units * UNIT)
        assert answer in ("ok", f"error {errno.ENOSPC}"), answer

    @rule(which=numbers, how=st.sampled_from([*["read"] * 6, *["kill"] * 3, "stop"]))
    def restart(self, which: int, how: str) -> None:
        """Killed while it answers. That takes its time: now and then."""
        if how == "read":
            self.read_one(which)
            return
        self.steps[how] += 1
        assert self.engine is not None
        if how == "kill":
            slot = which % SLOTS
            self.engine.send(f"read {slot * SLOT_BLOCKS * BLOCK} {10 * BLOCK}")
            self.engine.kill()
        else:
            self.engine.close()
        self.engine = EngineShell(self.build, self.description)

    def teardown(self) -> None:
        if self.engine is not None:
            self.engine.kill()
        if self.pruner is not None:
            self.pruner.kill()
        shutil.rmtree(self.directory)
        shutil.rmtree(self.files)


@pytest.fixture
def web(need: Need, tmp_path: Path) -> Iterator[WebServer]:
    need(NGINX)
    with web_server(tmp_path / "web") as server:
        yield server


@pytest.mark.timeout(900)
def test_it_reads_the_same_for_ever(sanitized_build: Path, web: WebServer) -> None:
    steps: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    keys = {"build": sanitized_build, "web": web, "steps": steps, "answers": answers}
    begun_s = time.monotonic()
    run_state_machine_as_test(
        type("Machine", (LazyMachine,), keys),
        settings=settings(
            # Some come to nothing: their beginnings, the first one.
            max_examples=STEPS * 13 // 10 // STEPS_EACH,
            stateful_step_count=STEPS_EACH,
            phases=[Phase.generate, Phase.shrink],
        ),
    )
    took_s = time.monotonic() - begun_s
    print(f"{steps.total()} steps in {took_s:.0f} s: {dict(steps)}; {dict(answers)}")
    assert steps.total() >= STEPS
    # Each of what may happen has, often.
    assert min(steps.values()) > STEPS / 500 and len(steps) == 10 + len(CHANGES), steps
    assert answers["bytes"] > STEPS / 4 and answers["EIO"] > STEPS / 100, answers
