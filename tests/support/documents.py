"""Commands that documents show, how they are run, and what they must print."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from support.devices import remove_all
from support.paths import PROJECT

from btrfs_ublk.base.entry import walk_commands
from btrfs_ublk.base.process import run
from btrfs_ublk.cli.main import command as root
from btrfs_ublk.kernel.temporary import loops_below

PROGRAM = "btrfs-ublk"
CONTEXTS = {context.command_path: context for context in walk_commands(root, PROGRAM)}

#: Languages of blocks whose lines are typed; "" is most of the README.
_SHELLS = {"", "sh", "bash", "shell", "console"}
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.M | re.S)
_OURS = re.compile(rf"(?:\S*/)?{PROGRAM}|(?:\./)?(?:scripts/[\w-]+|apply-lint\.sh)")
_BEFORE = {"sudo", "time", "exec", "nohup"}


@dataclass(frozen=True)
class Line:
    """One of our commands, as it stands at a place. ``replayed``: it is in a session
    whose output is shown as well.
    """

    document: str
    number: int
    words: tuple[str, ...]
    replayed: bool

    @property
    def place(self) -> str:
        return f"{self.document}:{self.number}: `{shlex.join(self.words)}`"


class WrongLine(Exception):
    """It says what a command line would be refused for."""


def documents() -> list[Path]:
    """All that tell commands."""
    documents = sorted((PROJECT / "docs").rglob("*.md"))
    return [PROJECT / "README.md", PROJECT / "HACKING.md", *documents]


def lines_of(document: Path) -> Iterator[Line]:
    """All commands of ours in its blocks of shell lines."""
    name = str(document.relative_to(PROJECT))
    text = document.read_text()
    for block in _BLOCK.finditer(text):
        if block[1] not in _SHELLS:
            continue
        first = text.count("\n", 0, block.start(2)) + 1
        is_session = block[1] == "console"
        for number, line in _shell_lines(block[2], is_session):
            for words in commands_in(line.replace("\\\n", " ")):
                yield Line(name, first + number, words, is_session)


def _shell_lines(text: str, is_session: bool) -> Iterator[tuple[int, str]]:
    """Lines with those that go on with them: after a backslash, an open quote, or, in a
    session, ">" as long as that is no here-document.
    """
    pending, started = "", 0
    for number, line in enumerate(text.splitlines()):
        if is_session:
            prompt, line = line[:2], line[2:]
            goes_on = prompt.rstrip() == ">" and "<<" not in pending
            if prompt != "$ " and not goes_on:
                continue
            if prompt == "$ " and pending:
                yield started, pending
                pending = ""
        if not pending:
            started = number
        pending = f"{pending}\n{line}" if pending else line
        if is_session:
            continue
        if _is_whole(pending):
            yield started, pending
            pending = ""
    if pending and is_session:
        yield started, pending


def _is_whole(line: str) -> bool:
    if not _OURS.match(line.lstrip("$ ")):
        return True  # prose and drawings have apostrophes
    if line.endswith("\\"):
        return False
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return False
    return True


def commands_in(line: str) -> Iterator[tuple[str, ...]]:
    """Our commands in a line of shell, without what is around them."""
    for inner in re.findall(r"\$\(([^()]*)\)", line):
        yield from commands_in(inner)
    lexer = shlex.shlex(
        line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>()\n"
    )
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:
        return
    words: list[str] = []
    for token in [*tokens, ";"]:
        if token and set(token) <= set("|&;<>()\n"):
            if set(token) <= set("<>"):
                words.append(token)  # what follows is a file
                continue
            yield from _ours(words)
            words = []
        else:
            words.append(token)


def _ours(words: list[str]) -> Iterator[tuple[str, ...]]:
    for at, word in enumerate(words):
        if word in ("<", ">", ">>"):
            words = words[:at]
            break
    while words and (words[0] in _BEFORE or re.match(r"[A-Za-z_]+=", words[0])):
        words = words[1:]
    if words and _OURS.fullmatch(words[0]):
        inner = words.index("--") if "--" in words else len(words)
        is_script = "scripts/" in words[0]
        yield tuple(words[:inner] if is_script else words)
        if is_script:
            yield from _ours(words[inner + 1 :])


def check_command(words: tuple[str, ...]) -> None:
    """Raise WrongLine for what the command, or script, would refuse."""
    if not words[0].endswith(PROGRAM):
        _check_script(words)
        return
    context = CONTEXTS[PROGRAM]
    rest = list(words[1:])
    while True:
        rest = _without_options(context, rest)
        if not isinstance(context.command, click.Group) or not rest:
            return
        path = f"{context.command_path} {rest[0]}"
        if path not in CONTEXTS:
            raise WrongLine(f"there is no command `{path}`")
        context, rest = CONTEXTS[path], rest[1:]
        if isinstance(context.command, click.Group) and not rest:
            raise WrongLine(f"`{path}` needs a verb")


def _without_options(context: click.Context, words: list[str]) -> list[str]:
    """The words that are left."""
    command = context.command
    fresh = click.Context(command, parent=context.parent, info_name=context.info_name)
    fresh.allow_interspersed_args = not isinstance(command, click.Group)
    try:
        values, left, _ = command.make_parser(fresh).parse_args(list(words))
        for parameter in command.params:
            value = values.get(parameter.name or "")
            is_argument = isinstance(parameter, click.Argument)
            if parameter.required and _is_missing(value):
                what = (
                    parameter.make_metavar(fresh) if is_argument else parameter.opts[-1]
                )
                raise WrongLine(f"`{context.command_path}`: {what} is missing")
            if isinstance(parameter.type, click.Choice) and isinstance(value, str):
                parameter.type.convert(value, parameter, fresh)
    except click.UsageError as error:
        raise WrongLine(f"`{context.command_path}`: {error.format_message()}") from None
    if left and not isinstance(command, click.Group):
        raise WrongLine(f"`{context.command_path}`: unexpected {left}")
    return left


def _is_missing(value: object) -> bool:
    return value is None or value == () or type(value).__name__ == "Sentinel"


def _check_script(words: tuple[str, ...]) -> None:
    """Its options are those that its text knows."""
    path = PROJECT / words[0]
    if not path.is_file():
        raise WrongLine(f"there is no {words[0]}")
    text = path.read_text()
    options = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    for option in options:
        if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text):
            raise WrongLine(f"{words[0]} knows no {option}")


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
_SURROUNDINGS = f"project = {str(PROJECT)!r}\n" + """
import fcntl, os, socket, struct, subprocess, sys
with socket.socket() as any_socket:  # as `ip link set lo up` does
    name = struct.pack("16sh14x", b"lo", 1)
    fcntl.ioctl(any_socket, 0x8914, name)
kept = os.open(project, os.O_PATH)
for path in ("/mnt", "/tmp", "/var/cache"):
    if not os.getcwd().startswith(path):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
if not os.path.exists(project):  # it is in one of them
    os.makedirs(project)
    bind = ["mount", "--no-canonicalize", "--bind", f"/proc/self/fd/{kept}", project]
    subprocess.run(bind, pass_fds=[kept], check=True)
os.close(kept)
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
