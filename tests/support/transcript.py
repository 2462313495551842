"""Runs the shell sessions in documents, and compares what the commands print.

In a block of ``console``, a line that begins with "$ " is a command, which goes on in
lines that begin with ">". Its output follows, where "…" stands for any text in a line,
and a line with "…" alone for any lines. A command that fails is followed by "(exit
status N)". All blocks of a document are one session of bash: as root, in new namespaces
(scripts/isolate), with only loopback as network, and with an empty /mnt, /tmp and
/var/cache.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.device_support import remove_all
from support.paths import PROJECT

from btrfs_ublk.base.process import run
from btrfs_ublk.kernel.temporary import loops_below

_PROMPT = "$ "
_ANYTHING = "…"
#: How long a background program may take until it has printed what is documented.
_READY_S = 60.0

# Commands come through descriptor 3, each ended by a NUL; they get no input.
_LOOP = """
while IFS= read -r -u 3 -d '' command; do
    eval "$command"
    printf '\\036%d\\036\\n' $?
done
"""

# These mounts are hidden from other processes, and end with the last process here.
_SURROUNDINGS = """
import fcntl, os, socket, struct, subprocess, sys
with socket.socket() as any_socket:  # as `ip link set lo up` does
    name = struct.pack("16sh14x", b"lo", 1)
    fcntl.ioctl(any_socket, 0x8914, name)
for path in ("/mnt", "/tmp", "/var/cache"):
    if not os.getcwd().startswith(path):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True)
class Step:
    """A command of a document, and its output there."""

    line: int
    command: str
    expected: str

    @property
    def in_background(self) -> bool:
        return self.command.rstrip().endswith("&")

    def matches(self, output: str) -> bool:
        return re.fullmatch(_pattern(self.expected), output) is not None


def _pattern(expected: str) -> str:
    lines = []
    for line in expected.splitlines(keepends=True):
        if line.strip() == _ANYTHING:
            lines.append(r"(?:.*\n)*?")
        else:
            lines.append(".*".join(map(re.escape, line.split(_ANYTHING))))
    return "".join(lines)


def steps(document: Path) -> list[Step]:
    """Return all commands of a document, in order."""
    found: list[Step] = []
    inside = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = line == "```console"
        elif inside and re.match(">( |$)", line) and found and not found[-1].expected:
            last = found.pop()
            found.append(Step(last.line, f"{last.command}\n{line[2:]}", ""))
        elif inside and line.startswith(_PROMPT):
            found.append(Step(number, line.removeprefix(_PROMPT), ""))
        elif inside:
            assert found, f"{document}:{number}: what printed that?"
            last = found.pop()
            found.append(Step(last.line, last.command, f"{last.expected}{line}\n"))
    return found


class Session:
    """A running shell."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output
        self._read = 0

    def run(self, step: Step, *, timeout_s: float) -> str:
        """Return stdout and stderr of the command, and its exit status if not 0."""
        assert self._process.stdin is not None
        self._process.stdin.write(step.command.encode() + b"\0")
        self._process.stdin.flush()
        deadline_s = time.monotonic() + timeout_s
        while not (end := re.search("\x1e(\\d+)\x1e\n", self._seen())):
            self._wait(step, deadline_s)
        if step.in_background:
            ready_s = time.monotonic() + _READY_S
            while not step.matches(self._said()) and time.monotonic() < ready_s:
                time.sleep(0.02)
        text = self._said()
        self._read = self._output.stat().st_size
        status = int(end[1])
        return text + (f"(exit status {status})\n" if status else "")

    def _seen(self) -> str:
        with self._output.open("rb") as file:
            file.seek(self._read)
            return file.read().decode(errors="replace")

    def _said(self) -> str:
        return re.sub("\x1e\\d+\x1e\n", "", self._seen())

    def _wait(self, step: Step, deadline_s: float) -> None:
        running = self._process.poll() is None
        assert running, f"line {step.line}: the shell has ended\n{self._seen()}"
        in_time = time.monotonic() < deadline_s
        assert in_time, f"line {step.line}: no end\n$ {step.command}\n{self._seen()}"
        time.sleep(0.02)


def _variables(isolated: bool) -> dict[str, str]:
    """Return our environment. Without isolation, omit what tests have set."""
    return {
        name: value
        for name, value in os.environ.items()
        if isolated or not name.startswith(("BTRFS_UBLK_", "TMPDIR"))
    }


@contextlib.contextmanager
def session(
    directory: Path,
    output: Path,
    *,
    environment: Mapping[str, str] | None = None,
    isolated: bool = True,
) -> Iterator[Session]:
    """Start a shell in ``directory``. If isolated, all that it starts ends with it."""
    commands, given = os.pipe()
    isolation: list[str | Path] = [
        *(PROJECT / "scripts" / "isolate", "unshare", "--net"),
        *(sys.executable, "-c", _SURROUNDINGS),
    ]
    with os.fdopen(given, "wb", buffering=0) as stdin, output.open("wb") as stdout:
        process = subprocess.Popen(
            [
                *(isolation if isolated else ()),
                *("bash", "--norc", "-c", f"exec 3<&{commands}\n{_LOOP}"),
            ],
            cwd=directory,
            env={**_variables(isolated), "LC_ALL": "C.UTF-8", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stdout,
            pass_fds=[commands],
        )
        os.close(commands)
        process.stdin = stdin
        try:
            yield Session(process, output)
        finally:
            stdin.close()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(timeout=20)


def replay_steps(
    document: Path, wanted: Iterable[Step], shell: Session, *, timeout_s: float = 120.0
) -> None:
    """Run commands of a document, and compare what they print."""
    for step in wanted:
        printed = shell.run(step, timeout_s=timeout_s)
        assert step.matches(printed), (
            f"{document}:{step.line}: it prints something else\n"
            f"$ {step.command}\n--- documented\n{step.expected}--- printed\n{printed}"
        )


def _environment(root: Path) -> dict[str, str]:
    temporary = root / "tmp"  # other people's programs leave files there
    temporary.mkdir()
    return {
        "TMPDIR": str(temporary),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(root),
        "BTRFS_UBLK_VOLUMES_DIR": str(root / "volumes"),
        "BTRFS_UBLK_IMAGES_DIR": str(root / "images"),
    }


@pytest.fixture(autouse=True)
def nothing_of_a_failure(sparse_path: Path) -> Iterator[None]:
    """A document that is wrong must not leave devices to those that follow."""
    yield
    remove_all()
    for device, _file in loops_below(sparse_path):
        run(["losetup", "--detach", device], timeout_s=10)
