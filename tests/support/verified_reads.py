"""Load that notices a dead server: a process that reads all the time and verifies that
(btrfs-ublk-verify-reads); and reads that ask the server.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from btrfs_ublk.base.helpers import VERIFY_READS, helper_path
from btrfs_ublk.base.process import Child, readable, spawn
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError

#: Extra time for what the reader does besides waiting for its reads.
_MARGIN_S = 30.0

Event = dict[str, Any]


class NoAnswerError(BtrfsUblkError):
    """A read, write or process takes longer than it may."""


def drop_pages(top: Path) -> None:
    """Have the next reads of the files below a directory ask the block device."""
    for path in top.rglob("*"):
        if path.is_file() and not path.is_symlink():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.fsync(fd)  # what is not written yet is not dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class VerifiedReads:
    """A running btrfs-ublk-verify-reads; made by verified_reads()."""

    def __init__(
        self, name: str, child: Child, commands: IO[bytes], deadline_s: int
    ) -> None:
        self.name = name
        self._child = child
        self._commands = commands
        self._deadline_s = deadline_s
        self._received = b""
        self._marks = 0

    @property
    def pid(self) -> int:
        return self._child.pid

    def mark(self) -> None:
        """Ask to be told when a read that begins from now on is answered."""
        self._marks += 1
        self._commands.write(b"mark\n")

    def wait_served(self, *, timeout_s: float) -> Event:
        """Return the answer to mark(): "at_ns" (CLOCK_MONOTONIC) is when the read was
        answered.

        Raises NoAnswerError when none is answered in time, or some read hangs.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            event = self._event(deadline_s, f"no read was answered for {timeout_s:g} s")
            if event["event"] == "hung":
                raise NoAnswerError(
                    f"{self.name}: a read of {event['length']} bytes at "
                    f"{event['offset']} has no answer after {self._deadline_s} s"
                )
            if event["event"] == "served" and event["mark"] == self._marks:
                return event

    def finish(self) -> Event:
        """End it, and return the report that the helper's --help describes. Waits for
        reads that are under way; those without an answer are counted as hung.
        """
        self._commands.close()
        deadline_s = time.monotonic() + self._deadline_s + _MARGIN_S
        while True:
            event = self._event(deadline_s, "it does not end")
            if event["event"] == "report":
                return event

    def _event(self, deadline_s: float, what: str) -> Event:
        assert self._child.stdout is not None
        fd = self._child.stdout.fileno()
        while b"\n" not in self._received:
            ready = readable([fd], timeout_s=deadline_s - time.monotonic())
            if not ready:
                raise NoAnswerError(f"{self.name}: {what}")
            data = os.read(fd, 65536)
            if not data:
                raise BtrfsUblkError(self._child.failure("ended without a report"))
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        event: Event = json.loads(line)
        return event


@contextmanager
def verified_reads(
    path: Path,
    *,
    name: str = "reads",
    threads: int | None = None,
    depth: int = 64,
    base: int = 0,
    seed: int = 1,
    deadline_s: int = 30,
) -> Iterator[VerifiedReads]:
    """Read ``path`` until finish(): ``depth`` direct reads at once, or, with
    ``threads``, through mmap(2). Each 8 bytes hold their offset plus ``base``. A read
    hangs when it takes longer than ``deadline_s`` seconds. ``name`` is for messages.
    """
    argv: Sequence[str | Path] = [
        # Verifying takes all the CPU that it gets, so others must go first.
        *("nice", "-n", "19"),
        *(helper_path(VERIFY_READS), "mmap" if threads else "direct"),
        *map(str, (threads or depth, base, seed, deadline_s)),
        path,
    ]
    with ExitStack() as stack:
        with deferred():
            theirs, ours = (
                stack.enter_context(os.fdopen(fd, mode, buffering=0))
                for fd, mode in zip(os.pipe(), ("rb", "wb"))
            )
        child = stack.enter_context(spawn(argv, stdin=theirs, pipe_stdout=True))
        # NB: with our copy open, write() would not fail after its death.
        theirs.close()
        yield VerifiedReads(name, child, ours, deadline_s)
