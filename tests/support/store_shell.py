"""store-shell (csrc/tests/store-shell.c): a map file, driven by JSON commands."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from support.sanitized_build import SANITIZER_ENVIRONMENT

TIMEOUT_S = 240


class StoreShell:
    """``with StoreShell(build, path) as shell:`` closes the map at the end."""

    def __init__(
        self, build: Path, path: Path, environment: dict[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [str(build / "csrc/tests/store-shell"), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | SANITIZER_ENVIRONMENT | (environment or {}),
        )
        #: Its first line: about the map, or why it was refused.
        self.opened: dict[str, Any] = {}

    def __enter__(self) -> StoreShell:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._fail()
        self.opened = json.loads(line)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.kill()
        if self.process.poll() is not None:
            return
        expected = 1 if "error" in self.opened else 0
        assert self.process.stdin is not None
        self.process.stdin.close()
        status = self.process.wait(TIMEOUT_S)
        self._close()
        assert status == expected, status

    def kill(self) -> None:
        """Kill with SIGKILL."""
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self._close()

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self._fail()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def add(
        self,
        mappings: list[list[int | None]],
        *sources: dict[str, Any],
        room: list[int] | None = None,
    ) -> dict[str, Any]:
        more = {} if room is None else {"room": room}
        return self.ask(add=mappings, sources=list(sources), **more)

    def list(self) -> list[list[int]]:
        mappings: list[list[int]] = self.ask(list=True)["mappings"]
        return mappings

    def _fail(self) -> None:
        self.process.kill()
        assert self.process.stderr is not None
        raise AssertionError(f"the shell ended: {self.process.stderr.read()}")

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def units_of(data: bytes, unit_bytes: int) -> list[bytes]:
    """Return the digest of each unit."""
    return [
        hashlib.sha256(data[at : at + unit_bytes]).digest()
        for at in range(0, len(data), unit_bytes)
    ]


def root_of(digests: list[bytes], *, size_bytes: int, unit_bytes: int) -> str:
    """Compute the root digest, as docs/materialisation.md defines it."""
    header = b"btrfs-ublk units 1\n" + struct.pack("<QI", size_bytes, unit_bytes)
    return hashlib.sha256(header + b"".join(digests)).hexdigest()
