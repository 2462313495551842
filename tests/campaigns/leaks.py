"""Ends commands at each of their system calls, and looks for what they leave.

``scripts/torture leaks --help``, with mounts and processes of its own. In each round, a
command gets INT, TERM, HUP or KILL at one of its system calls (its third openat, say)
of those that make, change, wait for or tell something; or its process group does, as by
Ctrl-C in a terminal. A round counts when the command has got so far. After INT, TERM
and HUP, all must be as before it or as after it: mounts, loop devices, processes,
files, and what the daemon has open. After KILL, ``btrfs-ublk gc``, ``device gc`` and
the same command again must lead to what it leads to alone, and undoing that back to
what was before. Things of others that look like ours must never change. Commands are
forks of this process, which has imported all of the package, so most rounds take less
than a second. Several campaigns may run at once.
"""

import atexit
import gc
import os
import pkgutil
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import NamedTuple

import campaign
import click
import psutil
from call_events import CALL_EVENTS, CallEvent, tracepoints
from leak_scenes import NAME, Scene, Scenes, Step, Words

import btrfs_ublk
from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.process import close_all_but, readable
from btrfs_ublk.base.signals import forget_handlers
from btrfs_ublk.bench import options
from btrfs_ublk.cli import main
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.temporary import loops_below, tempdir
from btrfs_ublk.testing.registry import REGISTRY, loopback_registry

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
#: A signal comes with one of these; reading and looking changes nothing.
_CALLS = tuple(
    "accept4 bind clone clone3 close connect fallocate fchmod fchmodat fchown fdatasync"
    " flock fsync ftruncate ioctl kill link linkat mkdir mkdirat mount open openat"
    " openat2 pidfd_send_signal poll pwrite64 recvfrom recvmsg rename renameat"
    " renameat2 rmdir sendmsg sendto symlink symlinkat umount2 unlink unlinkat vfork"
    " wait4 waitid write".split()
)
_TIMEOUT_S = 240.0
_SETTLE_S = 10.0

State = tuple[str, ...]


class Call(NamedTuple):
    """A system call of a command: the first one of its name, or the second, ..."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} {self.number}"


class Runner:
    """Runs commands as forks of this process, and looks at what there is."""

    def __init__(self, top: Path, stored: Path) -> None:
        """``stored`` has the repositories of the registry. All processes that there are
        are strangers."""
        self._top, self._stored = top, stored
        self._strangers = set(psutil.pids())
        #: All tags that servers of ours ever had.
        self._tags: set[str] = set()

    def fork(self, words: Words, begin: Callable[[], object] = lambda: None) -> int:
        """Start a command, which calls ``begin`` first."""
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                said = os.open(
                    self._top / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                )
                os.dup2(said, 1)
                os.dup2(said, 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                close_all_but(())
                forget_handlers()
                atexit._clear()
                sys.argv[:] = ["btrfs-ublk", *map(str, words)]
                begin()
                main.main()
            finally:
                os._exit(70)
        return pid

    def run(
        self,
        words: Words,
        watch: Callable[[int], AbstractContextManager[object]] | None = None,
    ) -> tuple[int, str]:
        """Return its status, and what it said. ``watch`` gets its process before it
        begins, and is left after its end."""
        if watch is None:
            return self._wait(self.fork(words), words), self._said()
        stop = partial(signal.raise_signal, signal.SIGSTOP)
        pid = self.fork(words, stop)
        os.waitpid(pid, os.WUNTRACED)
        with watch(pid):
            os.kill(pid, signal.SIGCONT)
            status = self._wait(pid, words)
        return status, self._said()

    def _said(self) -> str:
        return (self._top / "said").read_text(errors="replace")

    def _wait(self, pid: int, words: Words) -> int:
        pidfd = os.pidfd_open(pid)
        try:
            if not (ended := readable([pidfd], timeout_s=_TIMEOUT_S)):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        finally:
            os.close(pidfd)
        if not ended:
            raise BtrfsUblkError(f"{words[0]} {words[1]} hangs")
        return os.waitstatus_to_exitcode(status)

    def do(self, steps: Sequence[Step]) -> None:
        """Do steps that must work."""
        for step in steps:
            if callable(step):
                step()
                continue
            status, said = self.run(step)
            if status:
                raise BtrfsUblkError(f"{step[0]} {step[1]}: {status}: {said[-300:]}")

    def calls(self, words: Words) -> list[Call]:
        """Return the system calls of a command that succeeds."""
        counts: dict[str, int] = {}

        @contextmanager
        def count(pid: int) -> Iterator[None]:
            with ExitStack() as stack:
                events = {
                    name: stack.enter_context(CallEvent(pid, number))
                    for name, number in tracepoints(_CALLS).items()
                }
                yield
                counts.update((name, event.count) for name, event in events.items())

        status, said = self.run(words, count)
        if status:
            raise BtrfsUblkError(f"{words[0]} {words[1]}: {status}: {said[-300:]}")
        return [Call(x, 1 + n) for x, number in counts.items() for n in range(number)]

    def state(self) -> State:
        """Describe all that is there, without numbers that are chosen by chance."""
        found = [
            f"mount {x.target}" for x in read_mountinfo() if self._is_ours(x.target)
        ]
        tags = self._stored.glob("*/_manifests/tags/*")
        found += [f"image {x.relative_to(self._stored)}" for x in tags]
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid in self._strangers:
                    continue
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                command = process.cmdline()
                name = Path((command or ["-"])[0]).name
                # Others of a server depend on how much there was to read.
                open_files = ""
                if name == "btrfs-ublk-daemon":
                    open_files = f" with {len(os.listdir(f'/proc/{process.pid}/fd'))}"
                found.append(f"process {name}{open_files} files")
                self._tags |= set(re.findall(r"\b[0-9a-f]{16}\b", " ".join(command)))
        for path in sorted(self._top.rglob("*")):
            if path.is_file() and path.suffix in (".ledger", ".json"):
                with suppress(OSError):
                    text = path.read_text(errors="replace")
                    self._tags |= set(re.findall(r"\b[0-9a-f]{16}\b", text))
            within = path.relative_to(self._top)
            if within.parts[0] == "said" or "daemon" in within.parts:
                continue
            found.append(f"file {within}")
        found += [f"loop device of {path}" for _, path in loops_below(self._top)]
        for link in Path("/sys/block").glob("loop*/loop/backing_file"):
            with suppress(OSError):
                if link.read_text().strip().removeprefix("/btrfs-ublk-") in self._tags:
                    found.append("loop device of a server")
        # Ledgers have the number of a process in their name.
        names = (
            re.sub("[0-9a-f]{8,}", "H", x.replace(f"{self._top}", "")) for x in found
        )
        return tuple(sorted(re.sub(r"\d+-H", "N-H", name) for name in names))

    def settled(self, *wanted: State) -> State:
        """Return the state as soon as it is one that is wanted, or after a while."""
        end_s = time.monotonic() + _SETTLE_S
        while (now := self.state()) not in wanted and time.monotonic() < end_s:
            time.sleep(0.05)
        return now

    def rest(self) -> State:
        """Return the state when it does not change any more."""
        before: State = ()
        while (now := self.state()) != before:
            before = now
            time.sleep(1)
        return now

    def _is_ours(self, path: Path) -> bool:
        return self._top in path.parents


def differences(now: State, *others: State) -> str:
    """Say in what a state differs from the nearest of others."""
    nearest = min(others, key=lambda other: len(set(now) ^ set(other)))
    left, lost = set(now) - set(nearest), set(nearest) - set(now)
    return f"left: {sorted(left)[:5]}, gone: {sorted(lost)[:5]}"


@contextmanager
def decoys(top: Path) -> Iterator[Callable[[], list[str]]]:
    """Have things of others that look like ours. Yield what describes them all."""
    other = top.with_name(f"{top.name}-other")
    with ExitStack() as stack:
        other.mkdir()
        stack.callback(shutil.rmtree, other)
        for name in (
            "btrfs-ublk-0123456789abcdef",
            "sprout.img",
            "seed.img",
            "1.ledger",
        ):
            (other / name).write_bytes(bytes(1 << 20))
        device = stack.enter_context(loop_device(other / "sprout.img"))
        target = other / "mnt"
        target.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "btrfs-ublk", target], check=True, timeout=10
        )
        stack.callback(lambda: subprocess.run(["umount", target], timeout=10))
        (target / "file").touch()
        process = subprocess.Popen(
            ["btrfs-ublk-server", "1000000"], executable=shutil.which("sleep")
        )
        stack.callback(process.wait)
        stack.callback(process.kill)

        def look() -> list[str]:
            seen = [f"{x} {os.stat(x)[:4]}" for x in sorted(other.rglob("*"))]
            seen += [f"{name} of {path}" for name, path in loops_below(other)]
            seen += [str(x) for x in read_mountinfo() if x.target == target]
            return [*seen, f"{device.path}", f"process: {process.poll()}"]

        yield look


class Point(NamedTuple):
    """Where a command gets a signal. ``group``: its whole process group does."""

    call: Call
    signal: signal.Signals
    group: bool

    def __str__(self) -> str:
        to = " to the group" if self.group else ""
        return f"{self.signal.name}{to} at {self.call}"


def parse_point(_context: object, _parameter: object, text: str | None) -> Point | None:
    """Return what is written as its str()."""
    if text is None:
        return None
    names = {x.name: x for x in SIGNALS}
    found = re.fullmatch(r"(\w+)( to the group)? at (\w+) (\d+)", text)
    if not found or found[1] not in names or found[3] not in _CALLS:
        raise click.BadParameter(f"{text!r} is none, as 'SIGKILL at unlinkat 2' is")
    return Point(Call(found[3], int(found[4])), names[found[1]], bool(found[2]))


class Round(NamedTuple):
    """What came of a signal: ``reached`` is whether the command got to its point."""

    point: Point
    reached: bool
    faults: list[str]


class Campaign:
    """Rounds of all scenes."""

    def __init__(
        self,
        runner: Runner,
        look: Callable[[], list[str]],
        chances: random.Random,
        only: Point | None,
    ) -> None:
        """``only``: all rounds are at this point."""
        self.runner, self._look, self._only = runner, look, only
        self._chances = chances

    def run(self, scene: Scene, rounds: int, end_s: float) -> Iterator[Round]:
        """Do rounds, each at a random one of the scene's points."""
        runner = self.runner
        runner.do(scene.before)
        # Once without counting: what is made once only, as the daemon, is there then.
        runner.do([scene.words, *scene.undo])
        before = runner.rest()
        calls = runner.calls(scene.words)
        after = runner.rest()
        runner.do(scene.undo)
        if (again := runner.settled(before)) != before:
            raise BtrfsUblkError(f"undone: {differences(again, before)}")
        points = [Point(*x) for x in product(calls, SIGNALS, (False, True))]
        chosen = self._chances.sample(points, len(points))
        if self._only is not None:
            chosen = [self._only] * rounds
        done = 0
        for point in chosen:
            if done == rounds or time.monotonic() > end_s:
                break
            foreign = self._look()
            round_ = self._round(scene, point, before, after)
            if self._look() != foreign:
                round_.faults.append("a thing of others has changed")
            done += round_.reached
            yield round_
            if round_.faults:
                self._restore(scene, before)
        runner.do(scene.end)

    def _restore(self, scene: Scene, before: State) -> None:
        runner = self.runner
        for step in (("gc",), ("device", "gc"), scene.words, *scene.undo):
            with suppress(BtrfsUblkError, OSError):
                runner.do([step])
        if runner.settled(before) != before:
            raise BtrfsUblkError("a fault could not be undone")

    def _round(self, scene: Scene, point: Point, before: State, after: State) -> Round:
        runner, (at, number, group) = self.runner, point
        sent = False

        @contextmanager
        def signalled(pid: int) -> Iterator[None]:
            nonlocal sent
            to, event = -pid if group else pid, tracepoints(_CALLS)[at.name]
            with CallEvent(pid, event, at=at.number, to=to, number=number) as call:
                yield
                sent = call.sent

        status, said = runner.run(scene.words, signalled)
        faults = []
        if "Traceback" in said:
            faults.append(f"a traceback: {said[-300:]}")
        # While modules are imported, a signal ends the process at once.
        ends = {-number} if sent and number == signal.SIGKILL else {0, -number}
        if status not in ends | {128 + number}:
            faults.append(f"exit status {status}: {said[-300:]}")
        if number == signal.SIGKILL or scene.resumes:
            runner.run(("gc",))
            runner.run(("device", "gc"))
            status, said = runner.run(scene.words)
            if status and scene.unless not in said:
                faults.append(f"again: exit status {status}: {said[-300:]}")
            runner.do(scene.recover)
            wanted: tuple[State, ...] = (after,)
        else:
            if status:  # Otherwise all is done, and what it has fetched belongs to it.
                runner.do(scene.collect)
            wanted = (before, after)
        if (now := runner.settled(*wanted)) not in wanted:
            faults.append(f"{differences(now, *wanted)}: {said[-300:]}")
        elif now != before:
            try:
                runner.do(scene.undo)
            except (BtrfsUblkError, OSError) as error:
                faults.append(f"it cannot be undone: {error}")
            else:
                if (now := runner.settled(before)) != before:
                    faults.append(f"undone: {differences(now, before)}")
        # A command waits for others a different number of times, for example.
        return Round(point, sent, faults)


def clear(runner: Runner, scene: Scene) -> None:
    """Remove what a scene that ended early has left, as far as that works: what it has
    in the way of the next one fails there."""
    down: Sequence[Step] = (
        *(("gc",), ("device", "down", "d"), ("device", "gc")),
        *(("volume", "down", NAME), ("volume", "remove", NAME, "--yes")),
    )
    for step in (*down, *scene.end):
        with suppress(BtrfsUblkError, OSError):
            runner.do([step])


def _import_all() -> None:
    for module in pkgutil.walk_packages(btrfs_ublk.__path__, "btrfs_ublk."):
        if not re.search(r"__main__|\.bench|\.testing|^btrfs_ublk\.demo", module.name):
            with suppress(ImportError):
                import_module(module.name)


@campaign.command(
    "leaks",
    click.option("--kind", "chosen", multiple=True, help="Only such.  [default: all]"),
    click.option(
        "--at",
        callback=parse_point,
        metavar="POINT",
        help="Repeat this, as failures name it: 'SIGKILL at unlinkat 2'.",
    ),
    needs=(ROOT, BTRFS, LOOP, FUSE, CALL_EVENTS, REGISTRY),
    rounds=130,
)
def command(run: campaign.Run, chosen: Sequence[str], at: Point | None) -> None:
    """Send INT, TERM, HUP and KILL to commands, each at one of its system calls.

    Fails when anything is left that should not be, or anything of others has changed.
    The rounds, and the time, are of all kinds together, in equal parts.
    """
    if os.getpid() > 100:
        raise BtrfsUblkError(
            "it needs processes of its own", hint="run it by scripts/torture"
        )
    _import_all()
    gc.freeze()  # Forks copy less memory.
    top, stack = run.directory, run.stack
    kept = stack.enter_context(tempdir(parent=top.parent))
    host = stack.enter_context(loopback_registry(kept))
    stored = kept / "storage/docker/registry/v2/repositories"
    look = stack.enter_context(decoys(top))
    (top / "mnt").mkdir()
    # The daemon is to end, too: its files are in what is removed.
    stack.callback(_kill_all_but, set(psutil.pids()))
    runner = Runner(top, stored)
    found = Scenes(top, host, stored, runner.do).all()
    if unknown := set(chosen) - found.keys():
        raise click.BadParameter(f"no kinds {unknown}: {', '.join(found)}")
    kinds = list(chosen or found)
    for number, kind in enumerate(kinds):
        left = len(kinds) - number
        if not run.in_time():
            break
        until_s = time.monotonic() + (run.end_s - time.monotonic()) / left
        _do_kind(
            run,
            Campaign(runner, look, run.chances, at),
            kind,
            found[kind],
            left,
            until_s,
        )


def _do_kind(
    run: campaign.Run, made: Campaign, kind: str, scene: Scene, left: int, end_s: float
) -> None:
    """Do one of the ``left`` kinds."""
    began_s, before, missed = time.monotonic(), run.done, 0
    try:
        for each in made.run(scene, (run.rounds - run.done) // left, end_s):
            point = each.point
            result = {"kind": kind, "call": str(point.call), "group": point.group}
            result |= {"signal": point.signal.name}
            result["problems"] = [f"{kind}, {point}: {fault}" for fault in each.faults]
            if each.reached or each.faults:
                run.add(result)
            missed += not each.reached
            for problem in result["problems"]:
                options.progress(problem)
    except BtrfsUblkError as error:
        run.add({"kind": kind, "problems": [f"{kind}: ended early: {error}"]}, rounds=0)
        options.progress(f"{kind}: ended early: {error}")
        clear(made.runner, scene)
    took_s = time.monotonic() - began_s
    also = f", and {missed} that missed their call" if missed else ""
    options.progress(f"{kind}: {run.done - before} rounds{also} in {took_s:.0f} s")


def _kill_all_but(pids: set[int]) -> None:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid not in pids:
                process.kill()


if __name__ == "__main__":
    run_command(command, name="leaks.py")
