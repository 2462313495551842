"""From a click command to an exit status: what every entry point does with errors."""

from __future__ import annotations

import sys
from typing import NoReturn

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
    except click.exceptions.Abort:
        status = 130
    except KeyboardInterrupt as error:
        click.echo(f"{name}: interrupted", err=True)
        status = exit_status_of(error)
    sys.exit(status)
