"""Reads of healthy sources while the cache is slow, locked, full or broken."""

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.shells import EngineShell, VirtualData, describe, root_of, units_of

pytestmark = pytest.mark.data

SIZE = 40 << 20
SMALL_UNIT, UNIT = 4096, 65536
READ = 1 << 20
#: Far less than the cache hangs, and far more than reads take that do not wait for it.
DEADLINE_S = 10.0
HANG_MS = 60_000


class Served(VirtualData):
    """A source with digests, and a description of a segment that shows it."""

    def __init__(self, build: Path, directory: Path, unit: int, size: int) -> None:
        super().__init__(build, directory, SIZE)
        self.build = build
        self.cache = directory / "cache"
        self.source = directory / "source"
        self.size = size
        data = self._draw.randbytes(size)
        self.source.write_bytes(data)
        units = units_of(data, unit)
        self.add(
            {
                "size": size,
                "unit": unit,
                "kind": "file",
                "path": str(self.source),
                "digests": [one.hex() for one in units],
                "root": root_of(units, size_bytes=size, unit_bytes=unit),
            },
            data,
            0,
        )

    def shell(self, **environment: str) -> Any:
        segment = {
            "kind": "lazy",
            "length": SIZE,
            "map": str(self.map),
            "cache": str(self.cache),
            "deadline_s": DEADLINE_S,
        }
        preloaded = {
            "LD_PRELOAD": str(self.build / "csrc/tests/fail-writes.so"),
            "ASAN_OPTIONS": "verify_asan_link_order=0:exitcode=99",
            "FAIL_UNDER": str(self.cache),
        }
        return EngineShell(
            self.build,
            describe(segment),
            environment=preloaded | environment if environment else None,
        )

    def check(self, shell: EngineShell, start: int = 0, end: int | None = None) -> None:
        for at in range(start, self.size if end is None else end, READ):
            assert shell.request(f"read {at} {READ}") == self.content(at, READ), at


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetcher(shell: EngineShell) -> dict[str, Any]:
    stats: dict[str, Any] = shell.stats()["lazy"][0]["fetcher"]
    return stats


@pytest.fixture
def served(sanitized_build: Path, tmp_path: Path) -> Served:
    return Served(sanitized_build, tmp_path, UNIT, SIZE)


def test_a_disk_that_syncs_slowly(sanitized_build: Path, tmp_path: Path) -> None:
    """There are more units than may wait for one sync."""
    served = Served(sanitized_build, tmp_path, SMALL_UNIT, 10 << 20)
    with served.shell(SYNC_MS=str(HANG_MS)) as shell:
        served.check(shell)
        served.check(shell)
        assert fetcher(shell)["read_errors"] == 0
    # It has ended, although its cache has not: timeout_s of a shell is less.


@pytest.mark.parametrize(("first", "number"), [(1, errno.ENOSPC), (20, errno.EIO)])
def test_a_disk_that_refuses(
    sanitized_build: Path, tmp_path: Path, first: int, number: int
) -> None:
    served = Served(sanitized_build, tmp_path, UNIT, 4 << 20)
    failing = {"FAIL_FROM": str(first), "FAIL_COUNT": "1000000000"}
    with served.shell(**failing, FAIL_ERRNO=str(number)) as shell:
        served.check(shell)
        served.check(shell)
        assert fetcher(shell)["read_errors"] == 0


@pytest.mark.parametrize("running", [False, True])
def test_another_process_has_the_lock(served: Served, running: bool) -> None:
    """As a `cache prune` does that was stopped."""
    with served.shell() as shell:
        served.check(shell, 0, READ)
    with locked(served.cache / "lock"), served.shell() as shell:
        served.check(shell, 0, 8 * READ)
        assert fetcher(shell)["units_from_cache"] == 0
        assert fetcher(shell)["read_errors"] == 0
    if not running:
        return
    with served.shell() as shell:
        with locked(served.cache / "lock"):
            served.check(shell, 0, 8 * READ)
        # What waited for the lock goes on.
        shell.wait_until_cached()
        before = fetcher(shell)["units_fetched"]
        served.check(shell, 0, 8 * READ)
        assert fetcher(shell)["units_fetched"] == before


def test_the_source_is_gone_and_the_cache_locked(served: Served) -> None:
    """What only the cache has is waited for."""
    with served.shell() as shell:
        served.check(shell, 0, READ)
        shell.wait_until_cached()
    served.source.unlink()
    read = f"read 0 {READ}"
    with served.shell() as shell:
        with locked(served.cache / "lock"):
            shell.send(read)
            time.sleep(1)  # it may be late by then, and must not have failed
        assert shell.answer(read) == served.content(0, READ)
