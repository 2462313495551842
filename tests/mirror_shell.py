"""One mirror by itself (csrc/tests/mirror-shell.c)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sanitized_build import SANITIZER_ENVIRONMENT

TIMEOUT_S = 60
#: No proxy of the machine's stands between tests and their servers.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class Answer:
    """Of one fetch: ``data``, or why not."""

    data: bytes | None
    result: int
    failure: str = ""
    text: str = ""
    hint: str = ""
    retry_after_ms: int = 0
    identity: str | None = None


class MirrorShell:
    """A running one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def _ask(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "it has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _answer(self, length: int) -> Answer:
        assert self._process.stdout
        line = self._line()
        data = None if line["result"] else self._process.stdout.read(length)
        return Answer(data=data, **line)

    def probe(self, *, timeout_ms: int = 5000) -> dict[str, Any]:
        """{"result": 0, "size": ..., "identity": ...} or result, text and hint."""
        self._ask(f"probe {timeout_ms}")
        return self._line()

    def pin(self, identity: str) -> None:
        self._ask(f"pin {identity}")
        self._line()

    def fetch(self, offset: int, length: int, *, timeout_ms: int = 5000) -> Answer:
        return self.fetch_many(offset, length, 1, timeout_ms=timeout_ms)[0]

    def fetch_many(
        self, offset: int, length: int, count: int, *, timeout_ms: int = 5000
    ) -> list[Answer]:
        """That many ranges at a time, one behind the other."""
        self._ask(f"fetch {offset} {length} {timeout_ms} {count}")
        return [self._answer(length) for _ in range(count)]

    def cancel(self, offset: int, length: int, *, after_ms: int) -> Answer:
        """A fetch that is given up."""
        self._ask(f"cancel {offset} {length} {after_ms}")
        return self._answer(length)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k.lower() not in _PROXIES}
    return inherited | SANITIZER_ENVIRONMENT | dict(extra)


@contextmanager
def mirror_shell(
    build: Path,
    directory: Path,
    keys: Mapping[str, object],
    *,
    size: int,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[MirrorShell]:
    """Of a source that has only this mirror. A leak, or anything else that the
    sanitizers of the build find, fails here at the end.
    """
    source = directory / "source.json"
    source.write_text(json.dumps({**keys, "size": size}), encoding="utf-8")
    process = subprocess.Popen(
        [*prefix, str(build / "csrc/tests/mirror-shell"), str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(environment or {}),
    )
    try:
        yield MirrorShell(process)
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def refusal(build: Path, directory: Path, keys: Mapping[str, object]) -> str:
    """What is said of keys that are wrong."""
    source = directory / "source.json"
    source.write_text(json.dumps({"size": 4096, **keys}), encoding="utf-8")
    done = subprocess.run(
        [str(build / "csrc/tests/mirror-shell"), str(source)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=_environment({}),
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr
