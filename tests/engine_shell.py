"""engine-shell (csrc/tests/engine-shell.c): the engine without a front end."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sanitized_build import SANITIZER_ENVIRONMENT

BLOCK = 4096
SHELL_TIMEOUT_S = 30


class EngineShell:
    """One engine-shell process; requests go in as lines, answers come back whole."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def send(self, line: str) -> None:
        """A request whose answer nobody waits for."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def request(self, line: str) -> bytes | int:
        """The bytes of a successful request (empty but for reads), or an errno."""
        self.send(line)
        assert self._process.stdout is not None
        word, number = self._process.stdout.readline().split()
        if word == b"error":
            return int(number)
        if not line.startswith("read"):
            return b""
        return self._process.stdout.read(int(number))

    def stats(self) -> Any:
        """What a server would answer to a stats request."""
        return json.loads(self._line("stats"))

    def asked(self) -> list[str]:
        """What was asked of files since the last time."""
        return self._line("asked").decode().split()

    def map_request(self, name: str, **keys: Any) -> Any:
        """What a control connection would answer."""
        return json.loads(self._line(json.dumps({"request": name} | keys)))

    def kill(self) -> None:
        """As kill -9 does; nothing happens where it has ended."""
        self._process.kill()
        assert self._process.wait(SHELL_TIMEOUT_S) is not None
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what it has not read
                pipe.close()

    def close(self) -> None:
        """Ends it in good order; a sanitizer's report fails it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(SHELL_TIMEOUT_S) == 0
        self._process.stdout.close()

    def _line(self, request: str) -> bytes:
        self.send(request)
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def start_engine(build: Path, description: Path) -> EngineShell:
    """The caller kills or closes it."""
    return EngineShell(
        subprocess.Popen(
            [build / "csrc/tests/engine-shell", description],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | SANITIZER_ENVIRONMENT,
        )
    )


@contextmanager
def engine_shell(build: Path, description: dict[str, Any]) -> Iterator[EngineShell]:
    """Closed in good order, or killed where the test fails."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(description, file)
        file.flush()
        shell = start_engine(build, Path(file.name))
        try:
            yield shell
        except BaseException:
            shell.kill()
            raise
        shell.close()


def describe(*segments: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Segments one after the other; each says its length only."""
    offset = 0
    placed = []
    for segment in segments:
        placed.append({"offset": offset} | segment)
        offset += segment["length"]
    return {"version": 1, "size": offset, "segments": placed} | keys
