"""A store of several processes (SeaweedFS): its ETags, and parts of it that fail."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.needs import Need
from support.s3_server import PUBLIC_BUCKET, WEED, Cluster, s3_cluster
from support.shells import FetchShell, fetch_shell

pytestmark = pytest.mark.thorough

UNIT = 256 << 10
#: Of a multipart upload, all but the last have 5 MiB at least.
PART, UNITS = 5 << 20, 32
SIZE = UNITS * UNIT
DATA = b"".join(hashlib.sha256(b"%d" % n).digest() * (UNIT // 32) for n in range(UNITS))
KEY, OTHER = "parts", "others"
#: What docs/how-to/sources.md has for such stores.
LONG_DEADLINE_S = 60


@dataclass
class Reading:
    """A fetcher whose source has both gateways as mirrors."""

    cluster: Cluster
    shell: FetchShell
    source: int
    #: The same bytes in another object, which no gateway has cached before it is read.
    other: int

    def read_all(self, source: int | None = None, *, deadline_s: float = 30) -> None:
        """Read all, eight units at once, if not told otherwise with the deadline that
        is the default."""
        source = self.source if source is None else source
        for first in range(0, SIZE, 8 * UNIT):
            ats = range(first, first + 8 * UNIT, UNIT)
            reads = {
                self.shell.begin(source, at, UNIT, deadline_s=deadline_s): at
                for at in ats
            }
            for number, answer in self.shell.finish().items():
                at = reads[number]
                assert answer.result == 0, at
                assert answer.data == DATA[at : at + UNIT], at


@pytest.fixture
def reading(need: Need, sanitized_build: Path, tmp_path: Path) -> Iterator[Reading]:
    need(WEED)
    with ExitStack() as stack:
        (tmp_path / "s3").mkdir()
        cluster = stack.enter_context(s3_cluster(tmp_path / "s3"))
        cluster.gateways[0].put(PUBLIC_BUCKET, "first", b"it is up")
        parts = [DATA[at : at + PART] for at in range(0, SIZE, PART)]
        for key in (KEY, OTHER):
            cluster.gateways[0].put_in_parts(PUBLIC_BUCKET, key, parts)
        shell = stack.enter_context(fetch_shell(sanitized_build, log=tmp_path / "log"))
        sources = []
        for key in (KEY, OTHER):
            mirrors = [
                {
                    "kind": "s3",
                    "endpoint": gateway.endpoint,
                    "bucket": PUBLIC_BUCKET,
                    "key": key,
                    "anonymous": True,
                }
                for gateway in cluster.gateways
            ]
            keys = {"size": SIZE, "unit": UNIT, "mirrors": mirrors}
            sources.append(shell.add(keys))
        yield Reading(cluster, shell, *sources)


def test_both_gateways_name_parts_by_one_etag(reading: Reading) -> None:
    probes = [
        reading.shell.ask(
            {"probe": 1, "source": reading.source, "mirror": n, "timeout_ms": 9000}
        )
        for n in range(2)
    ]
    digests = b"".join(
        hashlib.md5(DATA[at : at + PART], usedforsecurity=False).digest()
        for at in range(0, SIZE, PART)
    )
    whole = hashlib.md5(digests, usedforsecurity=False).hexdigest()
    etag = f'etag "{whole}-{-(-SIZE // PART)}"'
    assert all(each["identity"].startswith(f"{etag} modified ") for each in probes)
    reading.read_all()


def test_a_gateway_that_is_killed(reading: Reading) -> None:
    reading.read_all()
    reading.cluster.kill_gateway(0)
    reading.read_all()


def test_a_gateway_that_is_silent(reading: Reading) -> None:
    reading.read_all()
    reading.cluster.silence_gateway(0)
    reading.read_all()


def test_a_server_of_volumes_that_is_silent(reading: Reading) -> None:
    """A gateway asks one of two copies by chance, and waits 30 s for a silent one, with
    all who want the same: another request there is no help, and at the other gateway
    only by chance. That is as long as our reads have by default."""
    reading.read_all()
    reading.cluster.silence_volumes(0)
    reading.read_all()  # the gateways have that
    reading.read_all(reading.other, deadline_s=LONG_DEADLINE_S)
