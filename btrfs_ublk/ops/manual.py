"""Man pages (man(7)) of the commands' help, and the table of a volume's settings."""

from __future__ import annotations

import inspect
import json
import os
import re
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from textwrap import wrap

import click

import btrfs_ublk
from btrfs_ublk.base.entry import PathType, run_command, walk_commands
from btrfs_ublk.cli.main import command as root
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.volume import SETTINGS, Setting

_NAME = "btrfs-ublk"
_EXIT_STATUS = (
    ("0", "Success."),
    ("1", "The command failed, or what it checks is not in order."),
    ("2", "The usage is wrong, or the input is invalid; nothing was changed."),
    ("3", "This machine lacks something: the message says what, and how to get it."),
    ("128 + N", "The command was ended by signal N."),
)
_COLUMNS = 78  # width of the pages' source
#: The command that makes the table of settings, run in the project's directory.
SETTINGS_COMMAND = "python -m btrfs_ublk.ops.manual settings docs/volumes.md"
_HEADING = "| key | option | | default | while the volume is up |"
_CHANGES = {
    "never": "never changes",
    "grows": "[only grows](#more-room)",
    "at once": "changes at once",
    "down": "is refused",
}


def man_pages(*, date: str) -> dict[str, str]:
    """Return a page for the program and one for each noun, by file name,
    "btrfs-ublk-seed.1"; ``date`` is YYYY-MM-DD.
    """
    first, *others = walk_commands(root, _NAME)
    by_noun = groupby(others, lambda each: each.command_path.split()[1])
    nouns = [list(contexts) for _, contexts in by_noun]
    commands = [".SH COMMANDS"]
    for noun, *_ in nouns:
        commands += [".TP", rf"\fB{_escape(_page_name(noun))}\fR(1)", _summary(noun)]
    pages = {f"{_NAME}.1": _page(first, [], commands, date)}
    for noun, *verbs in nouns:
        told = [".SH COMMANDS"] * bool(verbs)
        for verb in verbs:
            told += [f".SS {_escape(_usage(verb))}", *_text(verb), *_options(verb)]
        pages[f"{_page_name(noun)}.1"] = _page(noun, verbs, told, date)
    return pages


def _page(
    context: click.Context, verbs: list[click.Context], commands: list[str], date: str
) -> str:
    name, version = _escape(_page_name(context)), btrfs_ublk.__version__
    summary = _summary(context).rstrip(".")
    lines = [
        f'.TH {name.upper()} 1 {date} "{_NAME} {version}" "{_NAME}"',
        ".SH NAME",
        rf"{name} \- {summary[0].lower()}{summary[1:]}",
        ".SH SYNOPSIS",
    ]
    for number, each in enumerate(verbs or [context]):
        words = _usage(each).removeprefix(each.command_path).strip()
        lines += [".br"] * bool(number)
        lines.append(rf"\fB{_escape(each.command_path)}\fR {_escape(words)}")
    lines += [".SH DESCRIPTION", *_text(context)]
    if not verbs:  # a noun with verbs has no options of interest
        lines += [".SH OPTIONS", *_options(context)]
    lines += [*commands, '.SH "EXIT STATUS"']
    for status, text in _EXIT_STATUS:
        lines += [".TP", _escape(status), _prose(text)]
    related = ["btrfs(8)"] if context.parent is None else [f"{_NAME}(1)", "btrfs(8)"]
    return "\n".join([*lines, '.SH "SEE ALSO"', ", ".join(map(_escape, related)), ""])


def _page_name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _usage(context: click.Context) -> str:
    pieces = context.command.collect_usage_pieces(context)
    return " ".join([context.command_path, *pieces])


def _summary(context: click.Context) -> str:
    return _prose(inspect.cleandoc(context.command.help or "").partition("\n\n")[0])


def _text(context: click.Context) -> Iterator[str]:
    command = context.command
    parts = [inspect.cleandoc(text or "") for text in (command.help, command.epilog)]
    blocks = [each.strip("\n") for each in "\n\n".join(parts).split("\n\n")]
    for number, block in enumerate(filter(None, blocks)):
        yield from [".PP"] * bool(number)
        mark, _, rest = block.partition("\n")
        if mark.strip() == "\b":  # click keeps the line breaks that follow
            shown = inspect.cleandoc(rest).splitlines()
            yield from (".nf", *(_guarded(_escape(line)) for line in shown), ".fi")
        else:
            yield _prose(block)


def _options(context: click.Context) -> Iterator[str]:
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None:
            yield from (".TP", rf"\fB{_escape(record[0])}\fR", _prose(record[1]))


def _prose(text: str) -> str:
    """Format a paragraph; text in `backticks` becomes bold."""
    escaped = _escape(" ".join(text.split()))
    bold = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", escaped)
    lines = wrap(bold, _COLUMNS, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(_guarded, lines))


def _escape(text: str) -> str:
    plain = text.replace("\\", r"\e").replace("-", r"\-")
    return "".join(x if x.isascii() else rf"\[u{ord(x):04X}]" for x in plain)


def _guarded(line: str) -> str:
    """Escape a leading period or apostrophe, which would make the line a request."""
    return rf"\&{line}" if line.startswith((".", "'")) else line


def with_settings(document: str) -> str:
    """Return the document with the current table of settings in place of its own."""
    before, heading, after = document.partition(f"{_HEADING}\n|---|---|---|---|---|\n")
    rows = [_row(each) for each in SETTINGS.values() if each.kind.type is not None]
    rest = re.sub(r"\A(?:\|.*\n)*", "", after)
    return f"{before}{heading}{''.join(rows)}{rest}" if heading else document


def _row(setting: Setting) -> str:
    default = setting.unset
    if setting.default is not None:
        value = json.dumps(setting.kind.write(setting.default))
        default = f"`{value.removesuffix('.0')}`"
    help_ = f"{setting.help} {setting.more}".strip()
    cells = (f"`{setting.key}`", f"`{setting.option}`", help_, default)
    return f"| {' | '.join(cells)} | {_CHANGES[setting.change]} |\n"


@click.group()
def command() -> None:
    """Write the help of all commands as man pages, or the table of settings."""


@command.command("man")
@click.argument("directory", type=PathType(file_okay=False))
def man(directory: Path) -> None:
    """Write man pages into DIRECTORY, such as /usr/local/share/man/man1.

    Their date is today, or SOURCE_DATE_EPOCH.
    """
    now_s = float(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    pages = man_pages(date=time.strftime("%Y-%m-%d", time.gmtime(now_s)))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise BtrfsUblkError(f"cannot write {directory}: {error.strerror}") from error
    click.echo(f"{directory}: {len(pages)} pages", err=True)


@command.command("settings")
@click.argument("path", type=PathType(dir_okay=False))
def settings(path: Path) -> None:
    """Write the table of a volume's settings into the document PATH, which has one."""
    try:
        path.write_text(with_settings(path.read_text()))
    except OSError as error:
        raise BtrfsUblkError(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    run_command(command, name="btrfs-ublk-manual")
