"""From a click command to an exit status: what every entry point does with errors; and
groups of commands.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NoReturn

import click

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.interrupts import exit_status_of, interruptible


def run_command(command: click.Command, *, name: str) -> NoReturn:
    """Run a command and exit: 0, 1 failure, 2 usage, 128 + N after signal N.

    ``name`` stands before the messages on stderr.
    """
    try:
        with interruptible(exiting=True):
            status = command(standalone_mode=False, prog_name=name)
    except BtrfsUblkError as error:
        click.echo(f"{name}: error: {error}", err=True)
        for note in getattr(error, "__notes__", ()):
            click.echo(f"  note: {note}", err=True)
        status = error.exit_status
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        click.echo(f"{name}: interrupted", err=True)
        # NB: click makes an Abort of whatever interrupts a command.
        signalled = error if isinstance(error, KeyboardInterrupt) else error.__cause__
        status = 130
        if isinstance(signalled, KeyboardInterrupt):
            status = exit_status_of(signalled)
    sys.exit(status)


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
