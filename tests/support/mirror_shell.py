"""mirror-shell (csrc/tests/mirror-shell.c): one mirror by itself."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.sanitized_build import SANITIZER_ENVIRONMENT

TIMEOUT_S = 60
#: Variables that are removed, so that tests reach their servers without a proxy.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class Answer:
    """The answer to one fetch: ``data``, or the reason why there are none."""

    data: bytes | None
    result: int
    failure: str = ""
    text: str = ""
    hint: str = ""
    retry_after_ms: int = 0
    identity: str | None = None


class MirrorShell:
    """A running mirror-shell."""

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

    def probe(self, *, timeout_ms: int = 30_000) -> dict[str, Any]:
        """Return {"result": 0, "size": …, "identity": …}, or result, text and hint."""
        self._ask(f"probe {timeout_ms}")
        return self._line()

    def pin(self, identity: str) -> None:
        self._ask(f"pin {identity}")
        self._line()

    def digests(self) -> None:
        """Make it one of a source that has digests, which are not asked for here."""
        self._ask("digests")
        self._line()

    def fetch(self, offset: int, length: int, *, timeout_ms: int = 30_000) -> Answer:
        return self.fetch_many(offset, length, 1, timeout_ms=timeout_ms)[0]

    def fetch_many(
        self, offset: int, length: int, count: int, *, timeout_ms: int = 30_000
    ) -> list[Answer]:
        """Fetch ``count`` adjacent ranges at the same time."""
        self._ask(f"fetch {offset} {length} {timeout_ms} {count}")
        return [self._answer(length) for _ in range(count)]

    def cancel(self, offset: int, length: int, *, after_ms: int) -> Answer:
        """Begin a fetch, and cancel it ``after_ms`` milliseconds later."""
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
    """Run a shell for a source with only this mirror. Fails at the end if the build's
    sanitizers have found a leak or another error.
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
    """Return the error message for wrong keys."""
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
