"""What data come from: real servers, registries and stores, held to one contract.

``scripts/compatibility.py`` writes docs/compatibility.md from what is found here.
"""

import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.needs import Need
from support.paths import PROJECT
from support.peer import Peer
from support.waiting import wait_until
from system.peers.peers import PEERS

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.base.readers import read_buffered
from btrfs_ublk.content import Addition, Source
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.server import LazySegment
from btrfs_ublk.units import BLOCK_BYTES, GIB, KIB, MIB
from btrfs_ublk.volume.temporary import Volume
from btrfs_ublk.volume.temporary import volume as temporary_volume

#: One of each sort, of packages that scripts/setup --test installs.
GATE = ("apache2", "busybox", "distribution", "nginx", "python", "rclone")
RESULTS = PROJECT / "build" / "compatibility"
PAGE = PROJECT / "docs" / "compatibility.md"

SIZE = 2 * MIB + 77
UNIT = 64 * KIB
YES = "yes"


@pytest.fixture(
    params=[
        pytest.param(x, marks=() if x in GATE else pytest.mark.thorough) for x in PEERS
    ]
)
def peer(request: pytest.FixtureRequest, need: Need, tmp_path: Path) -> Iterator[Peer]:
    need(ROOT, BTRFS, FUSE, LOOP)
    found = PEERS[request.param]
    reason = found.install()
    if reason:
        pytest.skip(reason)
    root = tmp_path / "peer"
    root.mkdir()
    try:
        found.start(root)
        yield found
    finally:
        found.stop()


@dataclass
class Contract:
    """Checks a peer through a mounted volume, and keeps what each check ends with."""

    peer: Peer
    volume: Volume
    found: dict[str, str] = field(default_factory=dict)

    def check(self, name: str, action: Callable[[], str | None]) -> None:
        try:
            self.found[name] = action() or YES
        except (BtrfsUblkError, OSError, AssertionError) as error:
            self.found[name] = self._plain(str(error))

    def _plain(self, text: str) -> str:
        """Without what is another one in each run."""
        text = re.sub(rf"\b(127\.0\.0\.1|localhost):{self.peer.port}\b", "HOST", text)
        return re.sub(r"sha256:\w{64}", "DIGEST", text).splitlines()[0]

    def file(self, name: str, source: Source) -> Path:
        keys = {"unit": UNIT, **source}
        (added,) = self.volume.server.map_add([keys], [Addition()])
        if not added.length:
            return Path(os.devnull)
        assert added.length == -(-SIZE // BLOCK_BYTES) * BLOCK_BYTES, "another size"
        return self.volume.clone(name, offset=added.offset, size_bytes=SIZE)

    def object(self, name: str, seed: int) -> tuple[bytes, Path]:
        data = random.Random(seed).randbytes(SIZE)
        return data, self.file(name, self.peer.put(name, data))

    def all(self) -> None:
        self.check("whole and in parts", self.whole)
        self.check("empty", self.empty)
        self.check("replaced", self.replaced)
        self.check("restarted", self.restarted)
        self.check("refusal", self.refusal)

    def whole(self) -> None:
        """All of it, and 50 parts past the page cache; there is no other cache."""
        data, path = self.object("whole", 1)
        assert path.read_bytes() == data, "other bytes"
        choice = random.Random(2)
        for _ in range(50):
            at = choice.randrange(SIZE)
            length = choice.randint(1, min(SIZE - at, 3 * UNIT))
            part = read_buffered(path, at, length)
            assert part == data[at : at + length], f"other bytes at {at}"

    def empty(self) -> None:
        path = self.file("empty", self.peer.put("empty", b""))
        assert path.read_bytes() == b""

    def replaced(self) -> str | None:
        """By other bytes of the same size, of which none may be read: EIO, or what a
        server still has of before."""
        data, path = self.object("replaced", 3)
        assert read_buffered(path, 0, 10) == data[:10], "other bytes"
        before = self.failures("changed")
        why = self.peer.replace("replaced", random.Random(4).randbytes(SIZE))
        if why:
            return why
        try:
            part = read_buffered(path, MIB, UNIT)
        except OSError as error:
            assert self.failures("changed") > before, f"fails otherwise: {error}"
        else:
            assert part == data[MIB : MIB + UNIT], "the new bytes, beside the old ones"
        return None

    def restarted(self) -> None:
        """A read waits for a server that is away; where that starts slowly, until its
        host has failed for so long that it is left alone for a while."""
        data, path = self.object("restarted", 5)
        assert read_buffered(path, 0, 10) == data[:10], "other bytes"
        self.peer.stop()
        before = self.failures()
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_buffered, path, MIB, UNIT)
            # Of one that sends all of an object for a part, all of it was taken.
            wait_until(lambda: reading.done() or self.failures() > before)
            self.peer.start_again()
            try:
                part = reading.result()
            except OSError as error:
                said = self.volume.server.stats().lazy[0].fetcher
                opened = any(host["openings"] for host in said.hosts.values())
                assert opened, f"{error}, after {said.failures}"
                part = wait_until(lambda: read_at_last(path, MIB, UNIT))
            assert part == data[MIB : MIB + UNIT], "other bytes"

    def failures(self, *reasons: str) -> int:
        """Of these reasons; of all, if none is named."""
        found = self.volume.server.stats().lazy[0].fetcher.failures
        return sum(found[x] for x in reasons or found)

    def refusal(self) -> str:
        with pytest.raises(BtrfsUblkError) as caught:
            self.file("absent", self.peer.absent())
        return self._plain(str(caught.value))


def read_at_last(path: Path, offset: int, length: int) -> bytes:
    try:
        return read_buffered(path, offset, length)
    except OSError:
        return b""


@pytest.mark.device
def test_contract(request: pytest.FixtureRequest, peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    lazy = LazySegment(offset=0, length=GIB, map=str(tmp_path / "map"), deadline_s=120)
    with temporary_volume(
        tmp_path / "mnt",
        [lazy],
        virtual_data_size=GIB,
        front_end="fuse",
        read_ahead_bytes=0,
    ) as volume:
        contract = Contract(peer, volume)
        contract.all()
    RESULTS.mkdir(parents=True, exist_ok=True)
    about = {
        "name": peer.name,
        "kind": peer.kind,
        "version": peer.version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "found": contract.found,
        "notes": peer.notes,
    }
    text = json.dumps(about, indent=1)
    (RESULTS / f"{request.node.callspec.id}.json").write_text(f"{text}\n")
    for name, said in contract.found.items():
        usual = "HTTP status 404" if name == "refusal" else f"{YES}|cannot be"
        assert re.search(peer.otherwise.get(name, usual), said), (name, said)


def test_the_page_has_all_peers() -> None:
    """As scripts/compatibility.py wrote it."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", PAGE.read_text(), re.M)
    pinned = {x.name: getattr(x.package, "pin", "") for x in PEERS.values()}
    found = dict(rows)
    assert pinned.keys() <= found.keys()
    assert [x for x, pin in pinned.items() if pin not in found[x]] == []
