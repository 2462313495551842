"""From a click command to an exit status: what every entry point does with errors.
Groups of commands, and what commands have in common.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NoReturn

import click

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.interrupts import exit_status_of, interruptible
from btrfs_ublk.log import log

#: For every command that prints data.
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
#: The same for lists that may be long: they are printed while they are read.
json_lines_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, one object per line."
)

_Completion = Callable[[click.Context, click.Parameter, str], list[str]]


def completing(names: Callable[[], Iterable[str]]) -> _Completion:
    """``shell_complete=`` for an argument whose value is one of ``names()``."""

    def complete(
        _context: click.Context, _parameter: click.Parameter, incomplete: str
    ) -> list[str]:
        try:
            return [name for name in names() if name.startswith(incomplete)]
        except (BtrfsUblkError, OSError):
            return []  # others' directories, say; a shell is no place to complain

    return complete


def run_command(command: click.Command, *, name: str) -> NoReturn:
    """Run a command and exit: 0, 1 failure, 2 usage, 3 where this machine lacks what
    the command needs, 128 + N after signal N.

    ``name`` stands before the messages on stderr.
    """
    try:
        with interruptible(exiting=True):
            status = command(standalone_mode=False, prog_name=name)
    except BtrfsUblkError as error:
        click.echo(f"{name}: error: {error}", err=True)
        _tell_notes(error)
        status = error.exit_status
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (OSError, UnicodeEncodeError) as error:
        log.info("what ends this command:", exc_info=True)
        click.echo(f"{name}: error: {_describe(error)}", err=True)
        _tell_notes(error)
        status = 1
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        click.echo(f"{name}: interrupted", err=True)
        # NB: click makes an Abort of whatever interrupts a command.
        signalled = error if isinstance(error, KeyboardInterrupt) else error.__cause__
        status = 130
        if isinstance(signalled, KeyboardInterrupt):
            status = exit_status_of(signalled)
            _tell_notes(signalled)
    sys.exit(status)


def _describe(error: OSError | UnicodeEncodeError) -> str:
    if isinstance(error, UnicodeEncodeError):
        # A file's name, say, in the line of text that was to be written.
        line = error.object.rfind("\n", 0, error.start) + 1
        culprit = error.object[max(line, error.start - 40) : error.end]
        return f"{culprit!r} cannot be written in {error.encoding}"
    why = error.strerror or str(error) or type(error).__name__
    path = error.filename
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    return why if path is None else f"{path}: {why}"


def _tell_notes(error: BaseException) -> None:
    """What is left, say, as it could not be cleaned up."""
    for note in getattr(error, "__notes__", ()):
        click.echo(f"  note: {note}", err=True)


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """A table for people, its first row the headings, in columns of their own width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = zip(row, widths, strict=True)
        click.echo("  ".join(text.ljust(width) for text, width in padded).rstrip())


def walk_commands(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[click.Context]:
    """The command and all below it, each as a context that knows its path, in the order
    of help.
    """
    settings = command.context_settings
    context = click.Context(command, parent=parent, info_name=name, **settings)
    yield context
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None, below
            yield from walk_commands(found, below, context)


class ModuleGroup(click.Group):
    """A group whose commands are the modules of a package, each with a ``command``; a
    module is imported when its command is used. Those in ``but`` are none.
    """

    def __init__(
        self, *args: Any, package: ModuleType, but: Collection[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._package = package
        self._but = but

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = {module.name for module in iter_modules(self._package.__path__)}
        return sorted(name.replace("_", "-") for name in names.difference(self._but))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        name = f"{self._package.__name__}.{cmd_name.replace('-', '_')}"
        command: click.Command = import_module(name).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # NB: click itself (since 8.4) suggests commands that are imported only.
        known = self.list_commands(ctx)
        if args[0] not in known and not ctx.resilient_parsing:
            if near := get_close_matches(args[0], known):
                meant = " or ".join(map(repr, near))
                ctx.fail(f"No such command {args[0]!r}. Did you mean {meant}?")
        return super().resolve_command(ctx, args)
