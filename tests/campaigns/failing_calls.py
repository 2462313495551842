"""Fails each allocation and each system call of helpers in turn.

``python tests/campaigns/failing_calls.py --help``. A helper runs again and again, and
the first allocation fails, then the second, until it ends before one has failed; the
same for each kind of system call (``strace --inject``). It must succeed with what it
makes without a failure, or end with status 1 to 3 and a message; it must not crash,
hang, or succeed with anything else.
"""

import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import campaign
import click
from support.images import assemble

from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.base.entry import PathType, run_command
from btrfs_ublk.base.helpers import (
    CODEC,
    MKIMAGE,
    MKSEED,
    READIMAGE,
    SEED,
    helper_path,
)
from btrfs_ublk.base.process import run
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.study import Column, table
from btrfs_ublk.kernel.temporary import tempdir

STRACE = Program("strace", "strace")
PROJECT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 60.0
#: System calls that fail, and how.
CALLS = {
    "openat": "EMFILE",
    "read": "EIO",
    "pread64": "EIO",
    "write": "ENOSPC",
    "pwrite64": "ENOSPC",
    "pwritev": "ENOSPC",
    "mmap": "ENOMEM",
    "ftruncate": "EFBIG",
    "fallocate": "ENOSPC",
    "fsync": "EIO",
    "fdatasync": "EIO",
    "newfstatat": "EIO",
    "lseek": "EIO",
    "ioctl": "EIO",
    "getdents64": "EIO",
    "readlinkat": "EIO",
    "llistxattr": "EIO",
    "lgetxattr": "EIO",
    "statx": "EIO",
    "memfd_create": "EMFILE",
    "clone3": "EAGAIN",
    "renameat2": "EIO",
    "linkat": "EIO",
    "close": "EIO",
}
ALLOCATION, EVERY_LATER = "allocation", "all allocations from one on"


@dataclass(frozen=True)
class Scenario:
    """A command line with its standard input, and what it makes: a file, or a directory
    of files; or None: what it prints counts."""

    words: Sequence[str | Path]
    makes: Path | None = None
    input: bytes = b""


def _mkseed(directory: Path) -> Scenario:
    image = directory / "seed"
    size = ("--virtual-data-size=20G", "--chunk-size=4G", "--metadata-only")
    one = "6d0f9fa0-8ad1-4f6b-b1b5-7b3a1b7d5f11"
    fixed = ("--time=1", f"--fsid={one}", f"--device-uuid={one}")
    words: list[str | Path] = [helper_path(MKSEED), *size, *fixed, image]
    return Scenario(words, image)


def _inspected(directory: Path) -> Scenario:
    run(list(_mkseed(directory).words), timeout_s=_TIMEOUT_S)
    return Scenario([helper_path(SEED), "inspect", directory / "seed"])


def _indexed(directory: Path) -> Scenario:
    data = random.Random(1).randbytes(2000) * 100
    (directory / "plain").write_bytes(data)
    run(["gzip", "-k", "-n", str(directory / "plain")], timeout_s=_TIMEOUT_S)
    words: list[str | Path] = [helper_path(CODEC), "index", "gzip", "65536"]
    index = directory / "index"
    return Scenario([*words, directory / "plain.gz", index], index)


def _tree(directory: Path) -> Path:
    """A tree with some of each kind of file, and content of each kind of place."""
    tree = directory / "tree"
    (tree / "d").mkdir(parents=True)
    for number, size in enumerate((0, 30, 5000, 40_000, 300_000)):
        data = random.Random(number).randbytes(500) * 600
        (tree / f"d/file{number}").write_bytes(data[:size])
    os.setxattr(tree / "d/file1", "user.a", b"1" * 40)
    (tree / "symbolic").symlink_to("d/file1")
    (tree / "hard").hardlink_to(tree / "d/file1")
    os.mkfifo(tree / "fifo")
    for path in (*tree.glob("d/*"), tree / "d", tree / "fifo", tree):
        os.utime(path, (1, 1))
    os.utime(tree / "symbolic", (1, 1), follow_symlinks=False)
    return tree


def _mkimage(directory: Path) -> Scenario:
    made = directory / "image"
    layer = {"kind": "directory", "path": str(_tree(directory))}
    description = {"layers": [layer], "output": str(made), "time": 1, "threads": 2}
    # It makes files in a directory that is there.
    return Scenario([helper_path(MKIMAGE)], made, json.dumps(description).encode())


def _readimage(form: str) -> Callable[[Path], Scenario]:
    def scenario(directory: Path) -> Scenario:
        made = _mkimage(directory)
        (directory / "image").mkdir()
        run(list(made.words), input=made.input.decode(), timeout_s=_TIMEOUT_S)
        whole = assemble(directory / "image")
        return Scenario([helper_path(READIMAGE), form, "256", whole])

    return scenario


SCENARIOS: dict[str, Callable[[Path], Scenario]] = {
    "mkseed": _mkseed,
    "seed": _inspected,
    "codec": _indexed,
    "mkimage": _mkimage,
    "readimage-tar": _readimage("tar"),
    "readimage-list": _readimage("list"),
}


@dataclass(frozen=True)
class Outcome:
    """How one run ended: whether a call has failed, and what was wrong, or ""."""

    injected: bool
    problem: str
    status: int


def _digest(path: Path) -> str:
    """Of the data of a file, without reading holes."""
    total = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        at, end = 0, path.stat().st_size
        while at < end:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            hole = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            for start in range(at, hole, 1 << 20):
                block = os.pread(file.fileno(), min(1 << 20, hole - start), start)
                if block.count(0) != len(block):
                    total.update(str(start).encode() + block)
            at = hole
    return total.hexdigest()


class Subject:
    """Runs a scenario, and compares."""

    def __init__(self, name: str, directory: Path, library: Path) -> None:
        self.name, self.directory, self.library = name, directory, library
        self.scenario = SCENARIOS[name](directory)
        done = self._run([], {})
        if done.returncode:
            raise AssertionError(f"{name}: {done.stderr!r}")
        self.expected = self._made(done)

    def _run(
        self, before: Sequence[str], variables: dict[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        makes = self.scenario.makes
        if makes and self.scenario.input:
            shutil.rmtree(makes, ignore_errors=True)
            makes.mkdir()
        elif makes:
            makes.unlink(missing_ok=True)
        return subprocess.run(
            [*before, *map(str, self.scenario.words)],
            input=self.scenario.input,
            capture_output=True,
            timeout=_TIMEOUT_S,
            env=os.environ | variables,
        )

    def _made(self, done: subprocess.CompletedProcess[bytes]) -> bytes | str:
        makes = self.scenario.makes
        if makes is None:
            return done.stdout
        if makes.is_dir():
            return " ".join(f"{x.name}:{_digest(x)}" for x in sorted(makes.iterdir()))
        return _digest(makes) if makes.exists() else ""

    def fail(self, kind: str, number: int) -> Outcome:
        """Run it with one failure."""
        mark = self.directory / "mark"
        mark.unlink(missing_ok=True)
        variables, before = {}, list[str]()
        if kind in (ALLOCATION, EVERY_LATER):
            variables = {"FAIL_NTH": str(number), "FAIL_SAID": str(mark)}
            variables["LD_PRELOAD"] = str(self.library)
            if kind == EVERY_LATER:
                variables["FAIL_ON"] = "1"
        else:
            inject = f"inject={kind}:error={CALLS[kind]}:when={number}"
            before = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", str(mark)]
            before += ["-e", f"trace={kind}", "-e", inject]
        try:
            done = self._run(before, variables)
        except subprocess.TimeoutExpired:
            return Outcome(True, "it hangs", -1)
        if before:
            injected = "(INJECTED)" in mark.read_text(errors="replace")
        else:
            injected = mark.exists()
        problem = self._problem(done)
        if problem and self._is_the_loaders(done, before, variables):
            problem = ""
        return Outcome(injected, problem, done.returncode)

    def fail_each(self, kind: str, at: Iterator[int]) -> Result:
        result: Result = {"failed": 0, "succeeded": 0, "problems": []}
        for number in at:
            outcome = self.fail(kind, number)
            if not outcome.injected:
                break
            result["failed"] += 1
            result["succeeded"] += outcome.status == 0
            if outcome.problem:
                what = f"{self.name}, {kind} {number}: {outcome.problem}"
                result["problems"].append(what)
        return result

    def _is_the_loaders(
        self,
        done: subprocess.CompletedProcess[bytes],
        before: Sequence[str],
        variables: dict[str, str],
    ) -> bool:
        """Whether the program fails in the same way before it has begun."""
        program = str(self.scenario.words[0])
        least = subprocess.run(
            [*before, program, "--version"],
            capture_output=True,
            timeout=_TIMEOUT_S,
            env=os.environ | variables,
        )
        return done.returncode not in (0, 1) and least.returncode == done.returncode

    def _problem(self, done: subprocess.CompletedProcess[bytes]) -> str:
        if done.returncode == 0:
            if self._made(done) != self.expected:
                return "it succeeds with something else"
            return ""
        if done.returncode == 127 and b"shared librar" in done.stderr:
            return ""  # before the program has begun
        if done.returncode not in (1, 2, 3):
            return f"status {done.returncode}: {done.stderr[-300:]!r}"
        # What it finds wrong, a helper that checks prints as JSON.
        if done.stderr or (done.stdout and self._made(done) != self.expected):
            return ""
        return f"status {done.returncode} without a message"


def numbers(draw: random.Random, step: int, end_s: float = math.inf) -> Iterator[int]:
    """From 1 on, each; or one of each ``step`` at random. They end at a time, of
    time.monotonic()."""
    start = 1
    while time.monotonic() <= end_s:
        yield start + draw.randrange(step)
        start += step


#: Fails calls of a kind at numbers, until none has failed; returns a result with how
#: many ``failed`` and ``succeeded``, and the ``problems``.
Fail = Callable[[str, Iterator[int]], Result]


def fail_all(
    run: campaign.Run,
    names: Iterable[str],
    kinds: Iterable[str],
    subject: Callable[[str, Path], AbstractContextManager[Fail]],
    *,
    step: int,
) -> None:
    """Fail one of ``step`` calls of all kinds, of what ``subject`` makes of each name
    in a directory."""
    for name in names:
        with (
            tempdir(parent=run.directory) as directory,
            subject(name, directory) as fail,
        ):
            for kind in kinds:
                result = fail(kind, numbers(run.chances, step, run.end_s))
                result |= {"subject": name, "kind": kind}
                if rounds := result["failed"] + len(result["problems"]):
                    run.add(result, rounds=rounds)
        options.progress(f"{name}: {run.done} so far, {len(run.problems())} faults")


def tables(document: Document) -> list[Table]:
    """The table of a document of results, of which each has a ``subject``."""
    names = {
        "of": lambda result: str(result["subject"]),
        "what fails": lambda result: str(result["kind"]),
    }
    columns = [Column("calls failed", "failed"), Column("it succeeds", "succeeded")]
    return [table("Failing calls", document["results"], names, columns, left=2)]


step_option = click.option(
    "--step", type=options.COUNT, default=1, help="Fail one of so many calls."
)


@campaign.command(
    "failing-calls",
    click.option(
        "--helper", "helpers", type=click.Choice(sorted(SCENARIOS)), multiple=True
    ),
    click.option(
        "--library",
        type=PathType(exists=True, dir_okay=False),
        help="fail-malloc.so, of a build with -Dtests=true.",
        default=PROJECT / "build/sanitized/csrc/tests/fail-malloc.so",
    ),
    step_option,
    tables=tables,
    needs=(STRACE,),
    kinds=(ALLOCATION, EVERY_LATER, *CALLS),
    on_disks=False,
    has_directory=False,
    recorded=("step",),
)
def command(
    run: campaign.Run, helpers: Sequence[str], step: int, library: Path
) -> None:
    """Fail calls of all helpers, else of each --helper; all kinds of calls, else each
    --kind."""

    @contextmanager
    def subject(name: str, directory: Path) -> Iterator[Fail]:
        yield Subject(name, directory, library).fail_each

    fail_all(run, helpers or SCENARIOS, run.kinds, subject, step=step)


if __name__ == "__main__":
    run_command(command, name="failing_calls.py")
