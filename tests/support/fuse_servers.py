"""Servers that take over one FUSE connection in turn, and readers meanwhile."""

import json
import random
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from support.verified_reads import verified_reads

from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.kernel import loop
from btrfs_ublk.server import Description
from btrfs_ublk.server.fuse import attach_loop
from btrfs_ublk.server.fuse_connection import FuseConnection

READERS = 64
HOW = ("direct", "mmap")
TIMEOUT_S = 30.0


class Servers:
    """Starts the servers of one description, one after the other."""

    def __init__(self, directory: Path, description: Description) -> None:
        self._path = directory / "description.json"
        self._errors = directory / "errors"
        self._running: list[subprocess.Popen[str]] = []
        self.tag = secrets.token_hex(8)
        self.describe(description)

    def describe(self, description: Description) -> None:
        self.description = description
        self._path.write_text(description.to_json())

    def launch(
        self, *arguments: str, keep: Sequence[int] = (), stdout: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        with self._errors.open("wb") as errors:
            server = subprocess.Popen(
                [
                    *(helper_path(SERVER), "--front-end", "fuse"),
                    *("--tag", self.tag, *arguments, self._path),
                ],
                stdout=stdout,
                stderr=errors,
                text=True,
                pass_fds=keep,
            )
        self._running.append(server)
        return server

    def start(self, *arguments: str, keep: Sequence[int] = ()) -> dict[str, Any]:
        """Return the ready message, or {} if there is none. Then errors() says why."""
        server = self.launch(*arguments, keep=keep)
        assert server.stdout is not None
        line = server.stdout.readline()
        ready: dict[str, Any] = json.loads(line) if line else {}
        return ready

    def keep(self, ready: dict[str, Any]) -> FuseConnection:
        return FuseConnection.of_server(ready, ProcessIdentity.of(self.pid))

    def take_over(
        self, connection: FuseConnection, *arguments: str, keep: Sequence[int] = ()
    ) -> dict[str, Any]:
        ready = self.start(
            *("--recovery", "auto", *connection.arguments(), *arguments),
            keep=[*connection.descriptors(), *keep],
        )
        assert ready, self.errors()
        assert ready["recovery"] == "reissue"
        return ready

    def errors(self) -> str:
        return self._errors.read_text()

    @property
    def running(self) -> subprocess.Popen[str]:
        """The server that was started last."""
        return self._running[-1]

    @property
    def pid(self) -> int:
        return self.running.pid

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Kill the last server, and wait until it has ended."""
        server = self._running.pop()
        server.send_signal(signum)
        server.wait(TIMEOUT_S)
        if server.stdout:
            server.stdout.close()

    def close(self) -> None:
        while self._running:
            self.kill()


@contextmanager
def attached(servers: Servers, ready: dict[str, Any]) -> Iterator[Path]:
    device = attach_loop(
        ready,
        servers.tag,
        size_bytes=servers.description.size,
        read_only=servers.description.read_only,
    )
    try:
        yield device
    finally:
        assert loop.detach(device, servers.tag)


class Readers:
    """A process that reads all the time, many blocks at once."""

    def __init__(self, file: Path, how: str) -> None:
        self._stack = ExitStack()
        threads = {"direct": None, "mmap": READERS}[how]
        reads = verified_reads(
            file, threads=threads, depth=READERS, deadline_s=int(TIMEOUT_S)
        )
        self._reads = self._stack.enter_context(reads)

    def go_on(self) -> None:
        """Wait until a read that begins after now is answered, then up to 20 ms."""
        self._reads.mark()
        self._reads.wait_served(timeout_s=TIMEOUT_S + 5)
        time.sleep(random.uniform(0, 0.02))

    def finish(self) -> dict[str, Any]:
        return self._reads.finish()

    def must_be_content(self) -> int:
        """Check that no read was wrong, failed or hung. Returns the number of reads."""
        report = self.finish()
        found = report["wrong_bytes"], report["errors"], report["hung"]
        assert found == (0, 0, 0), report
        reads: int = report["reads"]
        return reads

    def kill(self) -> None:
        self._stack.close()
