"""Man pages (man(7)): one for the program, one for each noun."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import wrap

from btrfs_ublk.ops.manual.contents import (
    EXIT_STATUS,
    NAME,
    Command,
    Manual,
    Option,
    Paragraph,
)

_COLUMNS = 78  # width of the pages' source


def man_pages(manual: Manual, *, date: str) -> dict[str, str]:
    """Return the pages by file name, "btrfs-ublk-seed.1"; ``date`` is YYYY-MM-DD."""
    names = [_page_name(commands[0]) for commands in manual.nouns]
    pages = {f"{NAME}.1": _root_page(manual, date)}
    for name, commands in zip(names, manual.nouns, strict=True):
        pages[f"{name}.1"] = _noun_page(manual.version, commands, date)
    return pages


def _page_name(command: Command) -> str:
    return command.path.replace(" ", "-")


def _root_page(manual: Manual, date: str) -> str:
    lines = _head(manual.version, manual.root, date)
    lines += _description(manual.root)
    lines.append(".SH COMMANDS")
    for commands in manual.nouns:
        lines += [".TP", rf"\fB{_escape(_page_name(commands[0]))}\fR(1)"]
        lines.append(_prose(commands[0].summary))
    return _joined(lines + _tail([]))


def _noun_page(version: str, commands: tuple[Command, ...], date: str) -> str:
    noun, *verbs = commands
    lines = _head(version, noun, date, verbs)
    lines += _description(noun)
    if verbs:
        lines.append(".SH COMMANDS")
    for verb in verbs:
        lines += [f".SS {_escape(verb.usage)}", *_text([Paragraph(verb.summary)])]
        lines += [".PP"] * bool(verb.paragraphs)
        lines += [*_text(verb.paragraphs), *_options(verb.options)]
    return _joined(lines + _tail([NAME]))


def _head(
    version: str, command: Command, date: str, verbs: list[Command] | None = None
) -> list[str]:
    name = _page_name(command)
    lines = [
        f'.TH {_escape(name.upper())} 1 {date} "{NAME} {version}" "{NAME}"',
        ".SH NAME",
        rf"{_escape(name)} \- {_escape(_as_clause(command.summary))}",
        ".SH SYNOPSIS",
    ]
    for number, each in enumerate(verbs or [command]):
        words = each.usage.removeprefix(each.path).strip()
        lines += [".br"] * bool(number)
        lines.append(rf"\fB{_escape(each.path)}\fR {_escape(words)}")
    return lines


def _as_clause(summary: str) -> str:
    return summary[0].lower() + summary[1:].rstrip(".")


def _description(command: Command) -> list[str]:
    """Describe a page's own command; a noun with verbs has no options of interest."""
    paragraphs = command.paragraphs or (Paragraph(command.summary),)
    lines = [".SH DESCRIPTION", *_text(paragraphs)]
    if not command.is_group or command.path == NAME:
        lines += [".SH OPTIONS", *_options(command.options)]
    return lines


def _text(paragraphs: Sequence[Paragraph]) -> list[str]:
    lines = []
    for number, paragraph in enumerate(paragraphs):
        lines += [".PP"] * bool(number)
        if paragraph.verbatim:
            shown = [_guarded(_escape(line)) for line in paragraph.text.splitlines()]
            lines += [".nf", *shown, ".fi"]
        else:
            lines.append(_prose(paragraph.text))
    return lines


def _options(options: tuple[Option, ...]) -> list[str]:
    lines = []
    for option in options:
        lines += [".TP", rf"\fB{_escape(option.names)}\fR", _prose(option.text)]
    return lines


def _tail(related: list[str]) -> list[str]:
    lines = ['.SH "EXIT STATUS"']
    for status, text in EXIT_STATUS:
        lines += [".TP", _escape(status), _prose(text)]
    others = [f"{name}(1)" for name in related] + ["btrfs(8)"]
    return [*lines, '.SH "SEE ALSO"', ", ".join(map(_escape, others))]


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


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
