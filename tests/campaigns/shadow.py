"""Runs shadowed_writer.py, and talks to it."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from support.verified_reads import NoAnswerError

from btrfs_ublk.base.process import Child, describe_exit, readable, spawn
from btrfs_ublk.errors import BtrfsUblkError

_PROGRAM = Path(__file__).with_name("shadowed_writer.py")


class Writer:
    """A running shadowed_writer.py."""

    def __init__(self, child: Child, commands: int, timeout_s: float) -> None:
        self._child, self._commands, self._timeout_s = child, commands, timeout_s

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command, and return the answer. Raises NoAnswerError."""
        with suppress(BrokenPipeError):  # it has ended, and there is no answer
            os.write(self._commands, f"{command}\n".encode())
        assert self._child.stdout is not None
        if not readable([self._child.stdout], timeout_s=self._timeout_s):
            raise NoAnswerError(f"writer: {command!r} takes over {self._timeout_s} s")
        line = self._child.stdout.readline()
        if not line:
            status = self._child.wait(self._timeout_s)
            how = "is silent" if status is None else describe_exit(status)
            raise BtrfsUblkError(self._child.failure(f"the writer {how}"))
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def shadowed_writer(
    top: Path, lazy: Path, content: Path, *, seed: int, timeout_s: float
) -> Iterator[Writer]:
    """Run one for the directory ``top``, which clones from the file ``lazy``, whose
    content another file has."""
    with ExitStack() as stack:
        theirs, ours = map(os.fdopen, os.pipe(), ("rb", "wb"))
        stack.enter_context(ours)
        with theirs:
            argv: list[str | Path] = [sys.executable, _PROGRAM, top, lazy, content]
            argv.append(str(seed))
            child = stack.enter_context(spawn(argv, stdin=theirs, pipe_stdout=True))
        yield Writer(child, ours.fileno(), timeout_s)
