"""The help of the click commands, independent of any output format."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import click

import btrfs_ublk
from btrfs_ublk.base.entry import walk_commands
from btrfs_ublk.cli.main import command as root

NAME = "btrfs-ublk"
EXIT_STATUS = (
    ("0", "Success."),
    ("1", "The command failed, or what it checks is not in order."),
    ("2", "The usage is wrong, or the input is invalid; nothing was changed."),
    ("3", "This machine lacks something: the message says what, and how to get it."),
    ("128 + N", "The command was ended by signal N."),
)


@dataclass(frozen=True)
class Paragraph:
    """``verbatim``: its line breaks must be kept."""

    text: str
    verbatim: bool = False


@dataclass(frozen=True)
class Option:
    """``names`` as in help: "-o, --output FILE"."""

    names: str
    text: str


@dataclass(frozen=True)
class Command:
    """``summary`` is its first sentence. ``is_group``: it only has subcommands."""

    path: str
    usage: str
    summary: str
    paragraphs: tuple[Paragraph, ...]
    options: tuple[Option, ...]
    is_group: bool


@dataclass(frozen=True)
class Manual:
    """``nouns``: for each, the noun itself and then its commands."""

    version: str
    root: Command
    nouns: tuple[tuple[Command, ...], ...]


def read_manual() -> Manual:
    """Read the help of all commands, and so import them."""
    first, *others = (_read(context) for context in walk_commands(root, NAME))
    nouns: list[list[Command]] = []
    for command in others:
        if len(command.path.split()) == 2:
            nouns.append([])
        nouns[-1].append(command)
    return Manual(btrfs_ublk.__version__, first, tuple(map(tuple, nouns)))


def _read(context: click.Context) -> Command:
    command = context.command
    help_ = inspect.cleandoc(command.help or "")
    paragraphs = [*_paragraphs(help_), *_paragraphs(command.epilog or "")]
    records = [
        parameter.get_help_record(context)
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option)
    ]
    return Command(
        path=context.command_path,
        usage=" ".join([context.command_path, *command.collect_usage_pieces(context)]),
        summary=paragraphs[0].text,
        paragraphs=tuple(paragraphs[1:]),
        options=tuple(Option(*record) for record in records if record is not None),
        is_group=isinstance(command, click.Group),
    )


def _paragraphs(text: str) -> list[Paragraph]:
    found = []
    for block in text.split("\n\n"):
        first, _, rest = block.strip("\n").partition("\n")
        if first.strip() == "\b":
            found.append(Paragraph(inspect.cleandoc(rest), verbatim=True))
        elif first:
            found.append(Paragraph(" ".join(block.split())))
    return found
