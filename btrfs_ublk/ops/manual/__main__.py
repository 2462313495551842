"""``python -m btrfs_ublk.ops.manual``"""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from btrfs_ublk.base.entry import PathType, run_command
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.ops.manual import (
    man_pages,
    markdown,
    python_reference,
    read_manual,
    with_settings,
)


@click.group()
def command() -> None:
    """Write the help of all commands, and that of the Python API, in other forms."""


@command.command("man")
@click.argument("directory", type=PathType(file_okay=False))
def man(directory: Path) -> None:
    """Write man pages into DIRECTORY, such as /usr/local/share/man/man1.

    Their date is today, or SOURCE_DATE_EPOCH.
    """
    now_s = float(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    pages = man_pages(read_manual(), date=time.strftime("%Y-%m-%d", time.gmtime(now_s)))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise BtrfsUblkError(f"cannot write {directory}: {error.strerror}") from error
    click.echo(f"{directory}: {len(pages)} pages", err=True)


@command.command("markdown")
@click.argument("path", type=PathType(dir_okay=False))
def reference(path: Path) -> None:
    """Write the reference of all commands to PATH."""
    _write(path, markdown(read_manual()))


@command.command("python")
@click.argument("path", type=PathType(dir_okay=False))
def python(path: Path) -> None:
    """Write the reference of the Python API to PATH."""
    _write(path, python_reference())


@command.command("settings")
@click.argument("path", type=PathType(dir_okay=False))
def settings(path: Path) -> None:
    """Write the table of a volume's settings into the document PATH, which has one."""
    try:
        _write(path, with_settings(path.read_text()))
    except OSError as error:
        raise BtrfsUblkError(f"cannot read {path}: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BtrfsUblkError(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    run_command(command, name="btrfs-ublk-manual")
