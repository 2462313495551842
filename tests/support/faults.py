"""Functions and system calls that fail when a test wants it.

As a program: NUMBER=ERRNO... -- COMMAND..., which runs the command where the kernel
refuses those calls."""

import ctypes
import functools
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

_LOAD, _EQUAL, _ANSWER = 0x20, 0x15, 0x06  # linux/bpf_common.h
_ALLOWED, _FAILS = 0x7FFF0000, 0x00050000  # linux/seccomp.h
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2

Step = tuple[int, int, int, int]


def install(program: Sequence[Step]) -> None:
    """Filter this process' calls from now on, also without CAP_SYS_ADMIN."""
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *step) for step in program)
    )
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filters, 0, 0) == 0


def refuse(calls: Mapping[int, int]) -> None:
    """Have calls (by number) fail with an errno, in this process and its children.

    NB: numbers differ by machine; those since pidfd_send_signal(2), 424, do not.
    """
    program: list[Step] = [(_LOAD, 0, 0, 0)]
    for number, error in calls.items():
        program += [(_EQUAL, 0, 1, number), (_ANSWER, 0, 0, _FAILS | error)]
    install([*program, (_ANSWER, 0, 0, _ALLOWED)])


def refusing(calls: Mapping[int, int]) -> list[str]:
    """Return what is put in front of a command, so that it is run in such a process."""
    return [sys.executable, __file__, *(f"{x}={y}" for x, y in calls.items()), "--"]


def fail_at(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    when: str,
    error: BaseException,
) -> None:
    """Have what ``module`` calls as ``name`` raise an error, instead of its work or
    ("after") when it is done. A context manager's work is done when it is left."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, module)
    real = getattr(owner, last)

    def failing(*arguments: Any, **keywords: Any) -> Any:
        if when == "after":
            result = real(*arguments, **keywords)
            if hasattr(result, "__enter__"):
                result.__enter__()
                result.__exit__(type(error), error, None)
        raise error

    monkeypatch.setattr(owner, last, failing)


if __name__ == "__main__":
    at = sys.argv.index("--")
    refuse({int(x): int(y) for x, _, y in (z.partition("=") for z in sys.argv[1:at])})
    os.execvp(sys.argv[at + 1], sys.argv[at + 1 :])
