"""Errors that carry what was wrong, with what value, and what to do about it."""

from __future__ import annotations


class BtrfsUblkError(Exception):
    """Base of every error this package raises on purpose.

    ``hint`` says what the reader can do; ``exit_status`` is what a command that fails
    with this error returns (1: failure, 2: usage, 3: this machine cannot do it).
    """

    exit_status = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(BtrfsUblkError):
    """The caller's input is wrong; nothing was touched."""

    exit_status = 2


class CapabilityError(BtrfsUblkError):
    """This machine cannot do what was asked; the hint says how to enable it."""

    exit_status = 3


class CommandError(BtrfsUblkError):
    """An external command failed, or ran past its deadline."""


def error_of_status(exit_status: int | None) -> type[BtrfsUblkError]:
    """What a program of ours that ended with this status has failed with."""
    for kind in (UsageError, CapabilityError):
        if exit_status == kind.exit_status:
            return kind
    return CommandError


class LeftoverError(BtrfsUblkError):
    """Something could not be taken down; the message names what is still there."""
