"""Errors that say what was wrong, with what value, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from btrfs_ublk.base.urls import shown_text


class BtrfsUblkError(Exception):
    """Base of every error that this package raises on purpose.

    ``hint`` says what the reader can do. ``exit_status`` is that of a command which
    fails with this error (1: failure, 2: usage, 3: this machine cannot do it).
    """

    exit_status = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        # NB: so that messages may contain URLs with secrets.
        message = shown_text(message)
        super().__init__(message)
        self.message = message
        self.hint = None if hint is None else shown_text(hint)

    def prefix(self, what: str) -> None:
        """Put the subject before the message."""
        self.message = f"{shown_text(what)}: {self.message}"

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise BtrfsUblkError for a file that cannot be written in the block: cannot
    ``what``."""
    try:
        yield
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot {what}: {error.strerror or error}",
            hint="is its disk full, or read-only?",
        ) from error


def why_unread(error: OSError | UnicodeDecodeError) -> str:
    """Say why a text file could not be read."""
    if isinstance(error, UnicodeDecodeError):
        return (
            f"no text in UTF-8 (byte {error.start} is {error.object[error.start]:#x})"
        )
    return error.strerror or str(error)


class UsageError(BtrfsUblkError):
    """The caller's input is wrong; nothing was touched."""

    exit_status = 2


class CapabilityError(BtrfsUblkError):
    """This machine cannot do what was asked; the hint says how to enable it."""

    exit_status = 3


class CommandError(BtrfsUblkError):
    """An external command failed, or ran past its deadline."""


def error_of_status(exit_status: int | None) -> type[BtrfsUblkError]:
    """Return the error class for the exit status of one of our programs."""
    for kind in (UsageError, CapabilityError):
        if exit_status == kind.exit_status:
            return kind
    return CommandError


class LeftoverError(BtrfsUblkError):
    """Something could not be removed; the message names what is still there."""
