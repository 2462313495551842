"""Checks that nothing gets lost when the daemon, servers and keepers are killed.

``python tests/campaigns/kills.py --help``. Several kept volumes are up, so the daemon
supervises several devices. In each round, a process writes to the first volume
(shadowed_writer.py), while others read and verify what all of them serve. The daemon,
all servers or all keepers are killed at a random moment, or are stopped and go on, or
get TERM, once or --times in a round; in some rounds while another volume comes up, or
while the first one is upgraded (to another build and back, if --other names one),
which, should it fail then, must do when it is tried again. --kills 10000 has only
rounds in which they are killed, until so many processes were. The content of the first
volume is compared with what has been written: as soon as reads of all volumes are
answered again; after all was flushed and dropped from memory; and, each --remount
rounds, after it was taken down, checked and brought up. All random choices follow from
--seed. Nothing is left, whatever happens.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import campaign
import click
from campaign import Run, by_kind, summed, timed
from killable import (
    Signal,
    btrfs_check,
    retry,
    serving,
    signal_at_once,
    soon,
    where_it_waits,
)
from shadow import Writer, shadowed_writer
from support.verified_reads import (
    NoAnswerError,
    VerifiedReads,
    drop_pages,
    verified_reads,
)

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.process import Child, run, spawn
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.device import recover_device, remove_device, show_device
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.server import PatternSegment
from btrfs_ublk.units import GIB, KIB, MIB, TIB
from btrfs_ublk.volume import VolumeDefinition, VolumeFile, down_volume, up_volume
from btrfs_ublk.volume.store import volume_directory

#: The volume that is written to. Others, which are only read, have a number appended.
NAME = "campaign"
#: The volume that comes up while others are there.
COMING = f"{NAME}-coming"
_PATTERN_BYTES = 256 * GIB
_LAZY_BYTES = 8 * MIB
#: The cache holds a part of the lazy file, so that it is fetched again and again.
_CACHE_BYTES = 2 * MIB
_LONGEST_WORK_S = 1.5
_LONGEST_GAP_S = 0.5
#: Commands are about so far when what they need is killed, at most.
_LONGEST_COMMAND_S = 1.5
#: Every third round begins with a burst of small files.
_MANY_EVERY = 3
_MANY = {"fuse": 4000, "ublk": 1000}  # ublk is in an emulated machine, as a rule
_REMOUNTED = {"fuse": 1, "ublk": 5}
#: The share of a CPU that a verifying thread may use, as others need some, too.
_VERIFYING_SHARE = 0.2
_COMMAND_TIMEOUT_S = 300.0
#: As `device recover` does, for several: to start Python takes longer than the rest.
_RECOVER = [sys.executable, "-P", "-c", "import sys; from btrfs_ublk.device import *"]
_RECOVER[-1] += "; [*map(recover_device, sys.argv[1:])]"

_BOTH = ["daemon", "servers"]
ALL = "all three"
#: Commands that run while the others of their step are killed.
UP, UPGRADE = "up", "upgrade"
#: What is killed at once, of all volumes; and again, or what else, up to half a second
#: after what was killed before is back. After TERM or STOP, it gets that signal; what
#: is stopped gets CONT up to half a second after all others of its step got theirs.
KINDS: dict[str, Sequence[Sequence[str]]] = {
    "daemon": [["daemon"]],
    "daemon + servers": [_BOTH],
    "daemon, servers, keepers": [["daemon"], ["servers"], ["keepers"]],
    "servers": [["servers"]],
    "servers, servers": [["servers"], ["servers"]],
    "daemon + servers, again": [_BOTH, _BOTH],
    "servers + keepers": [["servers", "keepers"]],
    "keepers": [["keepers"]],
    "daemon + keepers": [["daemon", "keepers"]],
    ALL: [[*_BOTH, "keepers"]],
    "servers get STOP": [["STOP servers"]],
    "all get STOP": [["STOP servers", "STOP daemon", "STOP keepers"]],
    "servers, daemon gets STOP": [["STOP daemon", "servers"]],
    "daemon + servers, keepers get STOP": [["STOP keepers", *_BOTH]],
    "servers get TERM": [["TERM servers"]],
    "servers get TERM, TERM": [["TERM servers"], ["TERM servers"]],
    "keepers get TERM": [["TERM keepers"]],
    "daemon gets TERM": [["TERM daemon"]],
    "servers, daemon gets TERM": [["TERM daemon", "servers"]],
    "daemon during up": [[UP, "daemon"]],
    "servers during up": [[UP, "servers"]],
    "daemon + servers during up": [[UP, *_BOTH]],
    UPGRADE: [[UPGRADE]],
    "daemon during upgrade": [[UPGRADE, "daemon"]],
    "servers during upgrade": [[UPGRADE, "servers"]],
    "daemon + servers during upgrade": [[UPGRADE, *_BOTH]],
}
#: Those in which everything gets KILL.
KILLING = [
    kind
    for kind, steps in KINDS.items()
    if not any({UP, UPGRADE} & {*step} or " " in "".join(step) for step in steps)
]
#: Those of one step without a command, after which reads and writes go on.
SINGLE: dict[str, Sequence[str]] = {
    kind: steps[0]
    for kind, steps in KINDS.items()
    if len(steps) == 1 and kind != ALL and not {UP, UPGRADE} & {*steps[0]}
}


class BufferedReads:
    """A thread that reads through the page cache, and counts errors and wrong reads."""

    def __init__(self, path: Path, seed: int) -> None:
        self._pattern = PatternSegment(offset=0, length=_PATTERN_BYTES)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._chances = random.Random(seed)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.reads = self.wrong_bytes = self.errors = 0
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop reading. Raises NoAnswerError."""
        self._end.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise NoAnswerError(f"a buffered read takes over {timeout_s:g} s")
        os.close(self._fd)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._end.wait(pause_s):
            before_s = time.thread_time()
            offset = self._chances.randrange(_PATTERN_BYTES // MIB) * MIB
            must_be = self._pattern.content(offset, 64 * KIB)
            try:
                found = os.pread(self._fd, len(must_be), offset)
                if found != must_be:
                    self.wrong_bytes += len(must_be)
            except OSError:
                self.errors += 1
            self.reads += 1
            took_s = time.thread_time() - before_s
            pause_s = max(0.001, took_s * (1 / _VERIFYING_SHARE - 1))


def problems_of(result: Result) -> Iterator[str]:
    """Describe what readers and writers have noticed. A device that is "over" may fail
    requests, but must not lose what was written."""
    over = "over" in result
    if result.get("wrong_bytes"):
        yield f"{result['wrong_bytes']} wrong bytes read"
    if result.get("read_errors") and not over:
        yield f"{result['read_errors']} failed reads"
    yield from () if over else result.get("write_errors", ())
    for when, differences in result.get("different", {}).items():
        if differences:
            yield f"{len(differences)} differ, {when}: {differences[0]}"
    if result.get("check"):
        yield f"btrfs check: {result['check'].splitlines()[-1:]}"


def tables(document: Document) -> list[Table]:
    """Make a table with a row for each kind of death."""
    rounds, given = document["results"], document["parameters"]
    columns = [
        summed("kills"),
        timed("recovery_s", 0.5, "p50 ms", 0, 1e3),
        timed("recovery_s", 0.99, "p99 ms", 0, 1e3),
        timed("recovery_s", 1, "max ms", 0, 1e3),
        timed("pauses_s", 0.5, "a volume's p50 ms", 0, 1e3),
        timed("pauses_s", 0.99, "p99 ms", 0, 1e3),
        timed("settled_s", 0.99, "settled p99 ms", 0, 1e3),
        *(summed("operations"), summed("reads"), summed("read_errors", "failed reads")),
        *(summed("wrong_bytes"), summed("write_errors", "failed writes")),
    ]
    note = (
        f"{given['volumes']} volumes are up, with a daemon, and a server and a keeper "
        "each. The times are from the last kill until each volume has answered an "
        "uncached read that began after it, or one of them has; settled is until all "
        "devices have servers, keepers and a daemon again. After a comma: what is "
        "killed up to 0.5 s after what was killed before is back. What was written was "
        "compared at once, after a sync with empty caches, and after down and up. "
        "Reads fail when all three are killed and fuse has lost its connection."
    )
    title = f"Volumes' processes killed: {given['front_end']}"
    return [by_kind(title, rounds, columns, note=note)]


class Campaign:
    """A kept volume in ``directory``, and the processes that use it."""

    def __init__(
        self,
        run: Run,
        *,
        deadline_s: int,
        small_files: int,
        remount: int,
        volumes: int,
        other: Path,
        times: int,
        kills: int | None,
    ) -> None:
        self._run, self._remount, self._rounds = run, remount, run.rounds
        self._times, self._kills_left = times, kills or sys.maxsize
        self._builds = [sys.executable, str(other)]
        self._small_files = small_files
        self._front_end = run.front_end
        directory = run.directory
        self._target = directory / "mnt"
        self._chances = run.chances
        self._deadline_s = deadline_s
        self._content = directory / "content"
        self._content.write_bytes(self._chances.randbytes(_LAZY_BYTES))
        pattern = {"kind": "pattern", "size": _PATTERN_BYTES}
        names = ("direct", "mmap", "buffered")
        self._definition = VolumeDefinition(
            size_bytes=TIB,
            writable_bytes=2 * GIB,
            mount=self._target,
            front_end=run.front_end,
            cache_max_bytes=_CACHE_BYTES,
            files=(
                # Each reader has a file, as what another one has read is in memory.
                *(VolumeFile(each, pattern | {"base": 0}) for each in names),
                VolumeFile("lazy", {"kind": "file", "path": str(self._content)}),
            ),
        )

        def only_read(mount: str) -> VolumeDefinition:
            return VolumeDefinition(
                size_bytes=TIB,
                writable_bytes=GIB,
                mount=directory / mount,
                front_end=run.front_end,
                files=(VolumeFile("direct", pattern | {"base": 0}),),
            )

        #: Volumes that are only read, by name.
        self._others = {
            f"{NAME}-{number}": only_read(f"mnt-{number}")
            for number in range(2, volumes + 1)
        }
        self._coming = only_read("mnt-coming")
        self._names = [NAME, *self._others]
        self._writer: Writer | None = None
        #: Those that read each volume, by its name.
        self._reads: dict[str, list[VerifiedReads]] = {}

    @contextmanager
    def bed(self, _result: Result) -> Iterator[Callable[[Result], None]]:
        """Have all volumes, and a writer; yield what does a round."""
        with ExitStack() as stack:
            stack.callback(self._take_down, COMING)
            for name, definition in [(NAME, self._definition), *self._others.items()]:
                stack.callback(self._take_down, name)
                up_volume(name, definition)
            self._writer = stack.enter_context(
                shadowed_writer(
                    self._target / "written",
                    self._target / "lazy",
                    self._content,
                    seed=self._chances.randrange(1 << 32),
                    timeout_s=self._deadline_s,
                )
            )
            yield self._try

    def _try(self, result: Result) -> None:
        chances = random.Random(self._chances.randrange(1 << 32))
        try:
            self._round(result["kind"], chances, result)
        finally:
            result["problems"] += problems_of(result)

    def _take_down(self, name: str) -> None:
        """Take a volume down, even if nothing in it answers any more."""
        if not volume_directory(name).path.exists():
            return
        with suppress(BtrfsUblkError):
            recover_device(name)
        try:
            self._down(name)
        except BtrfsUblkError:
            # Make waiting requests fail.
            self._signal(["keepers", "daemon", "servers"], self._chances)
            with suppress(BtrfsUblkError):
                remove_device(name, timeout_s=10)
            self._down(name)

    def _down(self, name: str) -> None:
        retry(lambda: down_volume(name), timeout_s=self._deadline_s)

    def _round(self, kind: str, chances: random.Random, result: Result) -> None:
        writer = self._writer
        assert writer is not None
        many = self._small_files if result["number"] % _MANY_EVERY == 0 else 0
        result["small_files"] = chances.randint(many * 3 // 8, many)
        with self._reading(chances, result):
            self._mark()
            self._served_ns()
            writer.ask(f"go {result['small_files']}")
            time.sleep(chances.uniform(0, _LONGEST_WORK_S))
            result["kills"] = 0
            for _ in range(self._times):
                self._kill_and_recover(kind, chances, result)
                time.sleep(chances.uniform(0, _LONGEST_GAP_S))
                if "over" in result:
                    break
            self._kills_left -= result["kills"]
            if self._kills_left <= 0:
                self._run.end_s = 0
            paused = writer.ask("pause")
            result["operations"] = paused["operations"]
            result["write_errors"] = paused["errors"]
            different = result["different"] = {}
            if "over" not in result:
                different["recovered"] = writer.ask("compare")["differences"]
                self._flush()
                different["flushed"] = writer.ask("compare")["differences"]
        is_last = result["number"] == self._rounds or not self._run.in_time()
        if result["number"] % self._remount and not is_last and "over" not in result:
            return
        writer.ask("release")
        self._down(NAME)
        if "over" in result:
            for name, definition in self._others.items():
                self._down(name)
                up_volume(name, definition)
        result["check"] = btrfs_check(NAME)
        up_volume(NAME, self._definition)
        different["up again"] = writer.ask("compare")["differences"]

    def _kill_and_recover(
        self, kind: str, chances: random.Random, result: Result
    ) -> None:
        steps = KINDS[kind]
        by_hand = any("TERM daemon" in step for step in steps)
        with ExitStack() as stack:
            before: Sequence[str] = ()
            for step in steps:
                if before:
                    if self._is_by_hand():
                        stack.enter_context(self._recovering())
                    soon(lambda: self._all_have(before), f"no {before} has come")
                    time.sleep(chances.uniform(0, _LONGEST_GAP_S))
                for word in step:
                    if word in (UP, UPGRADE):
                        stack.enter_context(self._commanding(word, chances))
                words = [word for word in step if word not in (UP, UPGRADE)]
                begin_ns, signalled = self._signal(words, chances)
                result["kills"] += signalled
                before = [Signal.parse(word).role for word in words]
            self._mark()
            if kind == ALL and self._front_end == "fuse":
                # The FUSE connections have ended. Data in memory must still reach the
                # disk.
                result["over"] = True
                return
            if by_hand or self._is_by_hand():
                with self._recovering() as child:
                    if child.wait(_COMMAND_TIMEOUT_S) != 0:
                        raise BtrfsUblkError(child.failure("failed"))
            pauses_s = [(at_ns - begin_ns) / 1e9 for at_ns in self._served_ns()]
            result.setdefault("pauses_s", []).extend(pauses_s)
            result.setdefault("recovery_s", []).append(max(pauses_s))
        for name in self._names:
            soon(
                lambda: show_device(name).is_well or None, f"device {name} is not well"
            )
        # Until it has another keeper, a device does not outlive supervisor and server.
        soon(lambda: self._all_have(["keepers"]), "no keeper has come")
        settled_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        result.setdefault("settled_s", []).append((settled_ns - begin_ns) / 1e9)

    def _signal(self, words: Sequence[str], chances: random.Random) -> tuple[int, int]:
        """Do a step of a kind, see signal_at_once()."""
        return signal_at_once(
            words,
            lambda role: serving(self._names, role),
            chances,
            timeout_s=self._deadline_s,
        )

    @contextmanager
    def _commanding(self, word: str, chances: random.Random) -> Iterator[None]:
        """Have a command run. It may fail; the next one must not, and do the same."""
        if word == UP and not volume_directory(COMING).path.exists():
            up_volume(COMING, self._coming)
            self._down(COMING)
        words = ["volume", "up", COMING] if word == UP else ["device", "upgrade", NAME]
        if word == UPGRADE:
            self._builds.reverse()
        python = self._builds[0] if word == UPGRADE else sys.executable
        argv = [python, "-P", "-m", "btrfs_ublk.cli.main", *words]
        with spawn(argv, death_signal=None) as child:
            time.sleep(chances.uniform(0, _LONGEST_COMMAND_S))
            yield
            status = child.wait(_COMMAND_TIMEOUT_S)
            if status is None:
                raise BtrfsUblkError(f"{' '.join(words)} hangs")
            if status:
                run(argv, timeout_s=_COMMAND_TIMEOUT_S)
        if word == UP:
            self._look_at_what_came(chances)
            self._down(COMING)

    def _look_at_what_came(self, chances: random.Random) -> None:
        offset = chances.randrange(_PATTERN_BYTES // MIB) * MIB
        pattern = PatternSegment(offset=0, length=_PATTERN_BYTES)
        with (Path(str(self._coming.mount)) / "direct").open("rb") as file:
            file.seek(offset)
            if file.read(MIB) != pattern.content(offset, MIB):
                raise BtrfsUblkError("what came up meanwhile has wrong bytes")

    def _mark(self) -> None:
        for reads in self._reads.values():
            for each in reads:
                each.mark()

    def _served_ns(self) -> list[int]:
        """Wait until all readers have an answer to a read that began after _mark().
        Return when each volume had answered one of them (CLOCK_MONOTONIC)."""
        timeout_s = self._deadline_s
        return [
            min(int(each.wait_served(timeout_s=timeout_s)["at_ns"]) for each in reads)
            for reads in self._reads.values()
        ]

    def _all_have(self, roles: Sequence[str]) -> bool | None:
        """Return whether each volume has a process of each role; None if not."""
        found = all(serving([name], role) for name in self._names for role in roles)
        return found or None

    def _is_by_hand(self) -> bool:
        """Return whether a device has neither a keeper nor a daemon. A daemon that dies
        after keepers may have given some of the devices another one."""
        roles = ("keepers", "daemon")
        return not all(any(serving([x], role) for role in roles) for x in self._names)

    @contextmanager
    def _recovering(self) -> Iterator[Child]:
        """Run what has all devices supervised again."""
        with spawn([*_RECOVER, *self._names], death_signal=None) as child:
            yield child

    @contextmanager
    def _reading(self, chances: random.Random, result: Result) -> Iterator[None]:
        with ExitStack() as stack:

            def reads(path: Path, depth: int, threads: int | None) -> VerifiedReads:
                return stack.enter_context(
                    verified_reads(
                        path,
                        name=str(path),
                        threads=threads,
                        depth=depth,
                        seed=chances.randrange(1 << 30),
                        deadline_s=self._deadline_s,
                    )
                )

            self._reads[NAME] = [
                reads(self._target / "direct", 16, None),
                reads(self._target / "mmap", 16, 2),
            ]
            for name, definition in self._others.items():
                assert definition.mount is not None
                self._reads[name] = [reads(Path(definition.mount) / "direct", 1, None)]
            stack.callback(self._reads.clear)
            buffered = BufferedReads(self._target / "buffered", chances.getrandbits(30))
            try:
                yield
            except BtrfsUblkError:
                result["state"] = self._describe()
                options.progress(result["state"])
                raise
            finally:
                buffered.stop(self._deadline_s)
            reports: list[Any] = [
                each.finish() for reads in self._reads.values() for each in reads
            ]
            result["reads"] = buffered.reads + sum(each["reads"] for each in reports)
            for to, what in (("read_errors", "errors"), ("wrong_bytes", "wrong_bytes")):
                theirs = sum(each[what] for each in reports)
                result[to] = getattr(buffered, what) + theirs

    def _flush(self) -> None:
        """Write data in memory to disk, and drop them, so that reads use the disk."""
        run(["btrfs", "filesystem", "sync", self._target], timeout_s=_COMMAND_TIMEOUT_S)
        drop_pages(self._target / "written")

    def _describe(self) -> str:
        """Describe where each process hangs."""
        pids = [each.pid for reads in self._reads.values() for each in reads]
        pids += [self._writer.pid] if self._writer else []
        logs = [device_directory(name).log for name in self._names]
        words = [log.read_text()[-4000:] for log in logs if log.exists()]
        return "\n".join([*map(where_it_waits, pids), *words])


@campaign.command(
    "kills",
    campaign.deadline_option,
    click.option(
        "--small-files",
        type=click.IntRange(min=0),
        help=f"Written first in each third round, at most.  [default: {_MANY}]",
    ),
    click.option(
        "--remount",
        type=campaign.COUNT,
        help="Take the volume down and up after each N rounds.  "
        f"[default: {_REMOUNTED}]",
    ),
    click.option(
        "--volumes",
        type=campaign.COUNT,
        default=3,
        help="How many are up; one of them is written to.",
    ),
    campaign.other_option,
    click.option(
        "--times", type=campaign.COUNT, default=1, help="Do so in each round."
    ),
    click.option(
        "--kills",
        type=campaign.COUNT,
        help="Only kill, and end after so many, however many rounds that takes.",
    ),
    tables=tables,
    needs=(ROOT, BTRFS, LOOP),
    rounds=300,
    kinds=KINDS,
    front_ends=True,
    recorded=("volumes", "small_files", "remount", "times", "kills"),
)
def command(
    run: Run,
    deadline_s: int,
    small_files: int | None,
    remount: int | None,
    volumes: int,
    other: Path,
    times: int,
    kills: int | None,
) -> None:
    """Kill what serves volumes, and compare one with what was written to it.

    Fails when a byte is wrong or lost, a read or write fails, or something hangs.
    """
    if kills is not None:
        run.rounds = kills
        run.kinds = [kind for kind in run.kinds if kind in KILLING]
    made = Campaign(
        run,
        deadline_s=deadline_s,
        small_files=_MANY[run.front_end] if small_files is None else small_files,
        remount=remount or _REMOUNTED[run.front_end],
        volumes=volumes,
        other=other,
        times=times,
        kills=kills,
    )
    run.do_rounds(made.bed, _tell)


def _tell(result: Result) -> str:
    if "recovery_s" not in result:
        return "over"
    return f"{result['kills']} kills, {max(result['recovery_s']) * 1e3:.0f} ms at most"


if __name__ == "__main__":
    run_command(command, name="kills.py")
