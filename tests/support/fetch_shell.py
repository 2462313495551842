"""fetch-shell (csrc/tests/fetch-shell.c): the fetcher without a device."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.sanitized_build import SANITIZER_ENVIRONMENT
from support.waiting import wait_until

EXIT_TIMEOUT_S = 60


@dataclass(frozen=True)
class Answer:
    """The answer to a read: 0 and the data, or a negative errno."""

    result: int
    data: bytes
    ms: float


class FetchShell:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self._sources = 0
        self._reads = 0
        self._answers: dict[int, Answer] = {}

    def _send(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        """Return the next answer that is not to a read. Answers to reads are kept."""
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline()
            assert line, "fetch-shell has ended"
            answer: dict[str, Any] = json.loads(line)
            if "read" not in answer:
                return answer
            data = self._process.stdout.read(answer["bytes"])
            self._answers[answer["read"]] = Answer(answer["result"], data, answer["ms"])

    def ask(self, line: dict[str, Any]) -> dict[str, Any]:
        """Send a request that is answered at once, and return the answer."""
        self._send(line)
        return self._receive()

    def add(self, source: dict[str, Any]) -> int:
        answer = self.ask({"source": source})
        assert "error" not in answer, answer
        self._sources += 1
        return int(answer["source"])

    def pin(self, source: int, identity: str) -> None:
        """Pin the identity of its first mirror, before it is read."""
        self._send({"identity": 1, "source": source, "text": identity})

    def begin(
        self, source: int, offset: int, length: int, *, deadline_s: float | None = 30
    ) -> int:
        """Begin a read and return its number. ``finish`` waits for its answer."""
        self._reads += 1
        line = {
            "read": self._reads,
            "source": source,
            "offset": offset,
            "length": length,
        }
        if deadline_s is not None:
            line["deadline_ms"] = round(deadline_s * 1000)
        self._send(line)
        return self._reads

    def prefetch(self, source: int, offset: int, length: int) -> None:
        keys = {"source": source, "offset": offset, "length": length}
        self._send({"prefetch": 1, **keys})

    def wait_for(self, reads: Collection[int]) -> None:
        """Wait until these are answered, and perhaps others not. ``finish`` returns
        all answers."""
        wait_until(lambda: self.stats() and self._answers.keys() >= set(reads))

    def finish(self) -> dict[int, Answer]:
        """Wait for all reads, and return their answers by the numbers of ``begin``."""
        self.ask({"wait": 1})
        answers, self._answers = self._answers, {}
        return answers

    def read(
        self, source: int, offset: int, length: int, *, deadline_s: float | None = 30
    ) -> Answer:
        number = self.begin(source, offset, length, deadline_s=deadline_s)
        return self.finish()[number]

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.ask({"stats": 1})["fetcher"]
        return stats


@contextmanager
def fetch_shell(
    build: Path,
    *options: str,
    log: Path | None = None,
    program: Path | None = None,
    wrapper: Sequence[str] = (),
) -> Iterator[FetchShell]:
    """Run a fetch-shell with stderr to ``log``, and check its exit status. ``wrapper``
    is put in front of its command.

    Its servers are asked by the fetch process, as a server's are, or by ``program`` in
    its place; with ``BTRFS_UBLK_FETCH=in-process``, by the fetch-shell itself.
    """
    if program or os.environ.get("BTRFS_UBLK_FETCH") != "in-process":
        program = program or build / "csrc/tools/btrfs-ublk-fetch"
        options = (*options, f"process={program}")
    stderr = log.open("wb") if log else None
    process = subprocess.Popen(
        [*wrapper, build / "csrc/tests/fetch-shell", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    if stderr:
        stderr.close()
    with process:
        try:
            yield FetchShell(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(EXIT_TIMEOUT_S) == 0
        finally:
            process.kill()
