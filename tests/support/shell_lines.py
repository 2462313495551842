"""Our commands in documents: found in blocks of shell lines, and held to the real
command tree.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from support.paths import PROJECT

from btrfs_ublk.base.entry import walk_commands
from btrfs_ublk.cli.main import command as root

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


@dataclass(frozen=True)
class Parsed:
    """A command, and the options that are given; without their values."""

    path: str
    options: frozenset[str]

    def covers(self, other: Parsed) -> bool:
        """To have executed this one is to have executed the other, roughly."""
        return self.path == other.path and other.options <= self.options

    def __str__(self) -> str:
        return " ".join([self.path, *sorted(self.options)])


class WrongLine(Exception):
    """It says what a command line would be refused for."""


def documents() -> list[Path]:
    """All that tell commands; the reference is made of the commands themselves."""
    found = [PROJECT / "README.md", PROJECT / "HACKING.md"]
    found += sorted((PROJECT / "docs").rglob("*.md"))
    return [path for path in found if path.parent.name != "reference"]


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


def parse(words: tuple[str, ...]) -> Parsed:
    """Raises WrongLine for what the command, or script, would refuse."""
    if not words[0].endswith(PROGRAM):
        return _parse_script(words)
    context = CONTEXTS[PROGRAM]
    rest = list(words[1:])
    options: set[str] = set()
    while True:
        given, rest = _parse_options(context, rest)
        options |= given
        if not isinstance(context.command, click.Group) or not rest:
            return Parsed(context.command_path, frozenset(options))
        path = f"{context.command_path} {rest[0]}"
        if path not in CONTEXTS:
            raise WrongLine(f"there is no command `{path}`")
        context, rest = CONTEXTS[path], rest[1:]
        if isinstance(context.command, click.Group) and not rest:
            raise WrongLine(f"`{path}` needs a verb")


def _parse_options(
    context: click.Context, words: list[str]
) -> tuple[set[str], list[str]]:
    """Options that are given, and the words that are left."""
    command = context.command
    fresh = click.Context(command, parent=context.parent, info_name=context.info_name)
    fresh.allow_interspersed_args = not isinstance(command, click.Group)
    try:
        values, left, order = command.make_parser(fresh).parse_args(list(words))
        given = {each.name: each for each in order if each.name in values}
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
    found = {each.opts[-1] for each in given.values() if isinstance(each, click.Option)}
    return found, left


def _is_missing(value: object) -> bool:
    return value is None or value == () or type(value).__name__ == "Sentinel"


def _parse_script(words: tuple[str, ...]) -> Parsed:
    """Its options are those that its text knows."""
    path = PROJECT / words[0]
    if not path.is_file():
        raise WrongLine(f"there is no {words[0]}")
    text = path.read_text()
    options = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    for option in options:
        if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text):
            raise WrongLine(f"{words[0]} knows no {option}")
    return Parsed(words[0].removeprefix("./"), frozenset(options))
