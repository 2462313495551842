"""What studies of fetching read: an object on a web server of this machine, and ways to
read it: our devices, the peers nbdkit and rclone, programs that only fetch.
"""

import json
import os
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import psutil

from btrfs_ublk.base.capabilities import FUSE, Capability, Program
from btrfs_ublk.base.helpers import GET_RANGES, helper_path
from btrfs_ublk.base.process import Child, run, spawn
from btrfs_ublk.bench.content import require_room
from btrfs_ublk.bench.origin import origin
from btrfs_ublk.content import Addition, Digests, digest_file
from btrfs_ublk.content.digests import DEFAULT_UNIT_BYTES
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.server import (
    BlockServer,
    Description,
    FrontEndName,
    LazySegment,
    MemsetSegment,
)
from btrfs_ublk.units import MIB

TIMEOUT_S = 600.0
_READY_S, _POLL_S = 20.0, 0.02
CURL = Program("curl", package="curl")
OPENSSL = Program("openssl", package="openssl")
PEERS: Mapping[str, Sequence[Capability]] = {
    "nbdkit": [FUSE, Program("nbdkit", "nbdkit"), Program("nbdfuse", "libnbd-bin")],
    "rclone": [FUSE, Program("rclone", "rclone"), Program("fusermount", "fuse3")],
}
#: These compare nothing with a digest; ours does before it delivers.
UNVERIFIED = ", unverified"


@dataclass(frozen=True)
class Opened:
    """Something to read: ``path``, and the processes that answer for it."""

    path: Path
    pids: Sequence[int] = ()
    server: BlockServer | None = None

    def cpu_s(self) -> float:
        """Return the CPU time of these processes and their children until now."""
        found = [psutil.Process(pid) for pid in self.pids]
        ended = [each.cpu_times() for each in found]
        times = [each.cpu_times() for each in self._processes()[len(found) :]]
        waited_s = sum(each.children_user + each.children_system for each in ended)
        return float(waited_s + sum(x.user + x.system for x in (*ended, *times)))

    def waits(self) -> int:
        """Return how often their threads have gone to sleep until now."""
        count = 0
        for process in self._processes():
            for path in Path(f"/proc/{process.pid}/task").glob("*/status"):
                found = re.search(
                    r"^voluntary.*\s(\d+)$", path.read_text(), re.MULTILINE
                )
                count += int(found[1]) if found else 0
        return count

    def _processes(self) -> list[psutil.Process]:
        found = [psutil.Process(pid) for pid in self.pids]
        return found + [y for x in found for y in x.children(recursive=True)]


@dataclass(frozen=True)
class Bed:
    """An object of random bytes, its server, and directories: ``root`` in memory,
    ``disk`` for caches.
    """

    root: Path
    disk: Path
    path: Path
    origin: tuple[str, int]
    size_bytes: int
    front_end: FrontEndName
    _digests: dict[int, Digests] = field(default_factory=dict)
    _polls: list[None] = field(default_factory=list)

    @property
    def url(self) -> str:
        return "http://{}:{}/object".format(*self.origin)

    def requests(self) -> int:
        """Return how many requests for the object its server has had so far."""
        self._polls.append(None)
        with build_opener(ProxyHandler({})).open(
            "http://{}:{}/status".format(*self.origin), timeout=_READY_S
        ) as page:
            # "server accepts handled requests", and their numbers in the next line.
            return int(page.read().split()[9]) - len(self._polls)

    def digests(self, unit_bytes: int) -> Digests:
        """Compute the digests once, as the object may be large."""
        if unit_bytes not in self._digests:
            self._digests[unit_bytes] = digest_file(self.path, unit_bytes=unit_bytes)
        return self._digests[unit_bytes]

    def source(self, unit_bytes: int) -> dict[str, Any]:
        """Return the description of the object, with digests."""
        digests = self.digests(unit_bytes)
        digests.write(self.root / "digests")
        return {
            "kind": "http",
            "url": self.url,
            "proxy": "none",
            "size": self.size_bytes,
            "unit": unit_bytes,
            "digests": {"path": str(self.root / "digests")},
            "root": digests.root,
        }

    @contextmanager
    def alone(self) -> Iterator[Opened]:
        """Serve a device of the same size that fetches nothing: one repeated byte."""
        segment = MemsetSegment(offset=0, length=self.size_bytes, byte=97)
        description = Description(self.size_bytes, [segment])
        with BlockServer(description, front_end=self.front_end) as server:
            yield Opened(server.device, [server.pid], server)

    @contextmanager
    def ours(
        self,
        unit_bytes: int = DEFAULT_UNIT_BYTES,
        *,
        cache: Path | None = None,
        pins: bool = False,
    ) -> Iterator[Opened]:
        """Serve the whole object, verified with digests, or with what is pinned as it
        comes. Without a ``cache``, all that leaves memory is fetched again.
        """
        segment = LazySegment(
            offset=0,
            length=self.size_bytes,
            map=str(self.root / f"map-{time.monotonic_ns()}"),
            cache=None if cache is None else str(cache),
        )
        source = self.source(unit_bytes)
        if pins:
            del source["digests"], source["root"]
        description = Description(self.size_bytes, [segment])
        with BlockServer(description, front_end=self.front_end) as server:
            server.map_add([source], [Addition(offset=0, length=self.size_bytes)])
            yield Opened(server.device, [server.pid], server)

    @contextmanager
    def new_cache(self) -> Iterator[Path]:
        with tempdir(parent=self.disk) as directory:
            path = directory / "cache"
            path.mkdir(mode=0o700)
            yield path

    @contextmanager
    def with_cache(
        self, unit_bytes: int = DEFAULT_UNIT_BYTES, *, pins: bool = False
    ) -> Iterator[Opened]:
        """Serve the object with a new, empty cache on the disk."""
        with self.new_cache() as cache:
            with self.ours(unit_bytes, cache=cache, pins=pins) as opened:
                yield opened

    @contextmanager
    def nbdkit(self) -> Iterator[Opened]:
        """nbdkit's curl plugin with its cache filter, and nbdfuse: no loop device."""
        with tempdir(parent=self.disk) as directory, ExitStack() as stack:
            # In a short path, as a socket's name has at most 107 bytes.
            at, socket = directory / "mnt", self.root / f"nbd-{time.monotonic_ns()}"
            at.mkdir()
            words = ["nbdkit", "--foreground", "--readonly", "--unix", str(socket)]
            words += ["--filter=cache", "curl", f"url={self.url}", "proxy="]
            nbdkit = stack.enter_context(
                spawn(words, env={**os.environ, "TMPDIR": str(directory)})
            )
            _wait_for(nbdkit, socket)
            nbdfuse = stack.enter_context(
                _mounted(["nbdfuse", "-r", at / "object", "--unix", socket], at)
            )
            yield Opened(at / "object", [nbdkit.pid, nbdfuse.pid])

    @contextmanager
    def rclone(self) -> Iterator[Opened]:
        """rclone mount of the web server's directory, with its cache of file parts."""
        with tempdir(parent=self.disk) as directory:
            at = directory / "mnt"
            at.mkdir()
            words: list[str | Path] = ["rclone", "mount", ":http:", at, "--read-only"]
            words += ["--http-url", "http://{}:{}".format(*self.origin)]
            words += ["--vfs-cache-mode", "full", "--cache-dir", directory / "cache"]
            words += ["--config", "/dev/null"]
            with _mounted(words, at) as rclone:
                yield Opened(at / "object", [rclone.pid])

    def get_us(self, range_bytes: int, count: int) -> list[float]:
        """Return what bare requests for ranges took, over one kept connection."""
        words: list[str | Path] = [helper_path(GET_RANGES), "/object"]
        words += [f"--port={self.origin[1]}", f"--size={self.size_bytes}"]
        words += [f"--range={range_bytes}", f"--count={count}"]
        found = json.loads(run(words, timeout_s=TIMEOUT_S).stdout)["us"]
        return [float(each) for each in found]

    def fetch(self, then: str) -> None:
        """Fetch the whole object with curl, into the shell command ``then``."""
        command = f"set -e -o pipefail; curl -s --noproxy '*' {self.url} {then}"
        run(["bash", "-c", command], timeout_s=TIMEOUT_S)


@contextmanager
def _mounted(words: Sequence[str | Path], at: Path) -> Iterator[Child]:
    """Run a program that mounts ``at``, and unmounts it when it ends."""
    with spawn(words) as child:
        try:
            _wait_for(child, at / "object")
            yield child
        finally:
            if at.is_mount():
                run(["umount", "--lazy", at], timeout_s=_READY_S)


def _wait_for(child: Child, path: Path) -> None:
    deadline_s = time.monotonic() + _READY_S
    while not path.exists():
        if child.wait(_POLL_S) is not None or time.monotonic() > deadline_s:
            raise BtrfsUblkError(child.failure(f"did not make {path.name}"))


@contextmanager
def bed(
    parent: Path, disk: Path, *, size_bytes: int, front_end: FrontEndName
) -> Iterator[Bed]:
    """Make what is measured, in a directory in memory; caches are below ``disk``."""
    with ExitStack() as stack:
        root = stack.enter_context(tempdir(parent=parent))
        served = root / "served"
        served.mkdir()
        require_room(parent, size_bytes, "the object takes")
        chance = random.Random(1)
        with (served / "object").open("wb") as file:
            for _ in range(size_bytes // MIB):
                file.write(chance.randbytes(MIB))
        server = stack.enter_context(origin(root, served))
        yield Bed(root, disk, served / "object", server, size_bytes, front_end)
