"""cache-shell (csrc/tests/cache-shell.c): processes that share a local cache."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.sanitized_build import SANITIZER_ENVIRONMENT

TIMEOUT_S = 60
HEADER_BYTES = 512


def punch_hole(path: Path, offset: int, length: int) -> None:
    place = "-o", str(offset), "-l", str(length)
    subprocess.run(["fallocate", "-p", *place, path], check=True, timeout=TIMEOUT_S)


def key_of(number: int) -> str:
    """Return a key in hexadecimal digits, as in names of files."""
    return (number + 1).to_bytes(8, "little").hex() * 4


class CacheShell:
    """One process that has the cache open; see csrc/tests/cache-shell.c."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, *words: object) -> str:
        """Return the answer to a line, or "" if the process died meanwhile."""
        self.send(*words)
        return self.answer()

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def open(self, index: int, size: int, unit_bytes: int, key: str = "") -> str:
        return self.ask("open", index, key or key_of(index), size, unit_bytes)

    def stats(self) -> Any:
        return json.loads(self.ask("stats"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        """End the process; fail if a sanitizer reports something."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(TIMEOUT_S) == 0


def start_shell(
    build: Path,
    directory: Path,
    *,
    max_bytes: int = 0,
    reserve_bytes: int = 1,
    environment: dict[str, str] | None = None,
) -> CacheShell:
    """Start a shell; ``reserve_bytes`` 0 is the default: a twentieth of the disk."""
    return CacheShell(
        subprocess.Popen(
            [
                str(build / "csrc/tests/cache-shell"),
                str(directory),
                str(max_bytes),
                str(reserve_bytes),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | SANITIZER_ENVIRONMENT | (environment or {}),
        )
    )


@contextmanager
def cache_shell(build: Path, directory: Path, **options: Any) -> Iterator[CacheShell]:
    """Run a shell. At the end, close it, or kill it if the test fails."""
    shell = start_shell(build, directory, **options)
    with shell.process:
        try:
            yield shell
            if shell.process.poll() is None:
                shell.close()
        finally:
            shell.process.kill()


def refusal(build: Path, directory: Path, *, reserve_bytes: int = 1) -> str:
    """Return the error that a cache in ``directory`` is refused with."""
    done = subprocess.run(
        [
            str(build / "csrc/tests/cache-shell"),
            str(directory),
            "0",
            str(reserve_bytes),
        ],
        input="",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    assert done.returncode == 1, done
    return done.stderr
