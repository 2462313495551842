"""engine-shell (csrc/tests/engine-shell.c): the engine without a front end."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from support.sanitized_build import SANITIZER_ENVIRONMENT

BLOCK = 4096
SHELL_TIMEOUT_S = 60


class EngineShell:
    """One engine-shell process, which gets requests as lines."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def send(self, line: str) -> None:
        """Send a request without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def request(self, line: str) -> bytes | int:
        """Return what was read (b"" for other requests), or an errno."""
        self.send(line)
        return self.answer(line)

    def answer(self, line: str) -> bytes | int:
        """Return the answer to a request that was sent."""
        assert self._process.stdout is not None
        word, number = self._process.stdout.readline().split()
        if word == b"error":
            return int(number)
        if not line.startswith("read"):
            return b""
        return self._process.stdout.read(int(number))

    def stats(self) -> Any:
        """Return what a server would answer to a stats request."""
        return json.loads(self._line("stats"))

    def asked(self) -> list[str]:
        """Return the operations on files since the last call."""
        return self._line("asked").decode().split()

    def fail(self, kind: str, nth: int, *, later: bool = False) -> None:
        """Have calls of a kind fail from the next request on (failing.h)."""
        self.send(f"fail {kind} {nth} {int(later)}")

    def failed(self) -> int:
        """Have no more calls fail; return how many did."""
        return int(self._line("failed"))

    def map_request(self, name: str, /, **keys: Any) -> Any:
        """Return what a control connection would answer."""
        return json.loads(self._line(json.dumps({"request": name} | keys)))

    def kill(self) -> None:
        """Kill with SIGKILL. A process that has ended is no error."""
        self._process.kill()
        assert self._process.wait(SHELL_TIMEOUT_S) is not None
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # it has not read all
                pipe.close()

    def serves(self) -> bool:
        """Return whether it has started, rather than ended; calls fail no more."""
        try:
            return self.failed() >= 0
        except (ValueError, BrokenPipeError):
            return False

    def end(self) -> int:
        """End the process, unless it has; return its exit status."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        status = self._process.wait(SHELL_TIMEOUT_S)
        self._process.stdout.close()
        return status

    def close(self) -> None:
        """End the process; fail if a sanitizer reports something."""
        assert self.end() == 0

    def _line(self, request: str) -> bytes:
        self.send(request)
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def start_engine(
    build: Path,
    description: Path,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> EngineShell:
    """Start a shell, which the caller has to kill or close."""
    with log.open("wb") if log else nullcontext() as stderr:
        return EngineShell(
            subprocess.Popen(
                [build / "csrc/tests/engine-shell", description],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={
                    "BTRFS_UBLK_FETCH": str(build / "csrc/tools/btrfs-ublk-fetch"),
                    # Tests count requests, and the machine may be busy.
                    "BTRFS_UBLK_HEDGE_MS": "60000",
                    **os.environ,
                    **SANITIZER_ENVIRONMENT,
                    **(environment or {}),
                },
            )
        )


@contextmanager
def engine_shell(
    build: Path,
    description: dict[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[EngineShell]:
    """Run a shell, with stderr to ``log``. At the end, close it, or kill it if the test
    fails."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(description, file)
        file.flush()
        shell = start_engine(build, Path(file.name), environment, log)
        try:
            yield shell
        except BaseException:
            shell.kill()
            raise
        shell.close()


def describe(*segments: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Describe segments without offsets, which are placed one after the other."""
    offset = 0
    placed = []
    for segment in segments:
        placed.append({"offset": offset} | segment)
        offset += segment["length"]
    return {"version": 1, "size": offset, "segments": placed} | keys
