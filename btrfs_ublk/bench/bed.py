"""What studies of fetching read: an object on a web server of this machine, by our
devices, and by programs that only fetch.
"""

import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import psutil

from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.base.helpers import GET_RANGES, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.bench.content import require_room
from btrfs_ublk.bench.origin import origin
from btrfs_ublk.content import Addition, Digests, digest_file
from btrfs_ublk.content.digests import DEFAULT_UNIT_BYTES
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
_READY_S = 20.0
CURL = Program("curl", package="curl")
OPENSSL = Program("openssl", package="openssl")


@dataclass(frozen=True)
class Opened:
    """A device to read, and its server."""

    path: Path
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU time of the server and its children until now."""
        own, *others = [each.cpu_times() for each in self._processes()]
        waited_s = own.children_user + own.children_system
        return float(waited_s + sum(x.user + x.system for x in (own, *others)))

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
        server = psutil.Process(self.pid)
        return [server, *server.children(recursive=True)]


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

    def source(self, unit_bytes: int) -> dict[str, Any]:
        """Return the description of the object, with digests."""
        if unit_bytes not in self._digests:
            self._digests[unit_bytes] = digest_file(self.path, unit_bytes=unit_bytes)
        digests = self._digests[unit_bytes]
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
            yield Opened(server.device, server.pid)

    @contextmanager
    def ours(
        self, unit_bytes: int = DEFAULT_UNIT_BYTES, *, cache: Path | None = None
    ) -> Iterator[Opened]:
        """Serve the whole object, verified with digests. Without a ``cache``, all that
        leaves memory is fetched again.
        """
        segment = LazySegment(
            offset=0,
            length=self.size_bytes,
            map=str(self.root / f"map-{time.monotonic_ns()}"),
            cache=None if cache is None else str(cache),
        )
        description = Description(self.size_bytes, [segment])
        with BlockServer(description, front_end=self.front_end) as server:
            addition = Addition(offset=0, length=self.size_bytes)
            server.map_add([self.source(unit_bytes)], [addition])
            yield Opened(server.device, server.pid)

    @contextmanager
    def with_cache(self) -> Iterator[Opened]:
        """Serve the object with a new, empty cache on the disk."""
        with tempdir(parent=self.disk) as directory:
            cache = directory / "cache"
            cache.mkdir(mode=0o700)
            with self.ours(cache=cache) as opened:
                yield opened

    def get_us(self, range_bytes: int, count: int) -> list[float]:
        """Return what bare requests for ranges took, over one kept connection."""
        words: list[str | Path] = [helper_path(GET_RANGES), "/object"]
        words += [f"--port={self.origin[1]}", f"--size={self.size_bytes}"]
        words += [f"--range={range_bytes}", f"--count={count}"]
        found = json.loads(run(words, timeout_s=TIMEOUT_S).stdout)["us"]
        return [float(each) for each in found]

    def fetch(self) -> None:
        """Fetch the whole object with curl, and hash it."""
        command = f"set -e -o pipefail; curl -s --noproxy '*' {self.url}"
        command += " | openssl dgst -sha256"
        run(["bash", "-c", command], timeout_s=TIMEOUT_S)


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
