"""Fixtures: web servers on loopback that answer ranges, as separate processes.

NB: a thread of the tests' process would deadlock: it had to answer while the process
waits for it in a page fault and holds Python's global lock.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from btrfs_ublk.testing.factory import (
    Factory,
    factory_for_each_scope,
    one_for_each_scope,
)

if TYPE_CHECKING:
    from btrfs_ublk.testing.range_server import Served


@dataclass(frozen=True)
class RangeServer:
    """A running server of ``directory`` at ``base_url``, which ends with a /."""

    directory: Path
    base_url: str
    log: Path

    def url(self, name: str) -> str:
        return self.base_url + quote(name)

    def put(self, name: str, content: bytes) -> str:
        """Serve these bytes by that name; returns the URL. An existing file is replaced
        atomically, and its ETag changes.
        """
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(content)
        os.replace(new, path)
        return self.url(name)

    def served(self) -> list[Served]:
        """Return the requests so far, in order."""
        from btrfs_ublk.testing.range_server import Served

        text = self.log.read_text(encoding="utf-8")
        return [Served(**json.loads(line)) for line in text.splitlines()]


@contextmanager
def range_server(
    directory: Path, *, log: Path, timeout_s: float
) -> Iterator[RangeServer]:
    """Run a server. Raises BtrfsUblkError if it is not ready after ``timeout_s``."""
    from btrfs_ublk.base.process import readable, spawn
    from btrfs_ublk.errors import BtrfsUblkError

    log.touch()
    module = "btrfs_ublk.testing.range_server"
    argv = [sys.executable, "-m", module, str(directory), "--log", str(log)]
    with spawn(argv, pipe_stdout=True) as child:
        assert child.stdout is not None
        # The line arrives whole, or the process ends.
        if not readable([child.stdout], timeout_s=timeout_s) or not (
            url := child.stdout.readline().strip()
        ):
            raise BtrfsUblkError(child.failure(f"gave no URL within {timeout_s:g} s"))
        yield RangeServer(directory, url, log)


class RangeServerFactory(Factory[RangeServer]):
    """``make(directory)``: a RangeServer of that; ``make(files={NAME: BYTES})``: of a
    new one with these files. It answers on loopback, ranges as well; needs nothing.
    """

    def default(self) -> RangeServer:
        """A RangeServer of a new directory: ``put(name, bytes)`` returns a URL. It
        answers on loopback, ranges as well; needs nothing.
        """
        return self()

    def __call__(
        self, directory: Path | None = None, *, files: Mapping[str, bytes] | None = None
    ) -> RangeServer:
        """Serve ``directory``, or a new one, and put ``files`` there."""
        place = self.directory()
        if directory is None:
            directory = place / "files"
            directory.mkdir()
        server = self.hold(
            range_server(
                directory, log=place / "log", timeout_s=self.settings.timeout_s
            )
        )
        for name, content in (files or {}).items():
            server.put(name, content)
        return server


(
    btrfs_ublk_range_server,
    btrfs_ublk_range_server_module,
    btrfs_ublk_range_server_session,
) = one_for_each_scope(RangeServerFactory)
(
    btrfs_ublk_range_server_factory,
    btrfs_ublk_range_server_factory_module,
    btrfs_ublk_range_server_factory_session,
) = factory_for_each_scope(RangeServerFactory)
