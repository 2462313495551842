"""Has many hosts read one object, from its origin and through a ring of site caches.

``.venv/bin/python tests/campaigns/fleet.py --hosts 8 --size 20M --rate 100M`` prints a
row for each case: how long it took until all hosts had all, the longest read, what the
origin has sent as a multiple of the object, and reads that failed or were wrong.

A host is a process with the fetcher of the block server (fetch-shell), without a
device; nodes are processes of nginx. Each has a network namespace of its own on one
bridge, and the origin's link has a limit (tbf), of bits per second that all its
responses share. With ``--loopback``, all is on loopback, and the origin keeps that
limit itself. So bytes, errors and ratios say something; times do where the link is what
takes them, and not this machine's CPUs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import campaign
import click

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "tests"))

from fetch_shell import FetchShell, fetch_shell  # noqa: E402
from scripted_server import ScriptedServer, response, scripted_server  # noqa: E402
from site_cache_ring import Ring, ring  # noqa: E402
from site_network import Machine, Network  # noqa: E402

from btrfs_ublk.base.entry import run_command  # noqa: E402
from btrfs_ublk.units import parse_size  # noqa: E402

UNIT = 256 << 10
NODES = 3
#: Reads that a host has in flight.
WINDOW = 8
DEADLINE_S = 30
_PIECE = 32 << 10
_HEAD = "case                        hosts  ready s  worst s  origin  EIO  wrong"


class Link:
    """A link of ``rate`` bytes per second, shared by all that pass."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._free_s = rate, threading.Lock(), 0.0
        self.sent = 0

    def passing(self, data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), _PIECE):
            piece = data[at : at + _PIECE]
            with self._lock:
                self._free_s = max(self._free_s, time.monotonic())
                self._free_s += len(piece) / self._rate
                until_s = self._free_s
                self.sent += len(piece)
            time.sleep(max(0.0, until_s - time.monotonic()))
            yield piece


@dataclass
class Origin:
    data: bytes
    link: Link
    alive: bool = True

    def __call__(self, request: str) -> bytes | Iterator[bytes]:
        found = re.search(r"(?im)^range: bytes=(\d+)-(\d+)", request)
        if not self.alive:
            return b""
        if request.startswith("HEAD ") or found is None:
            return response('200 OK\nETag: "it"', length=len(self.data))
        first, last = int(found[1]), min(int(found[2]), len(self.data) - 1)
        head = f"206 Partial Content\nContent-Range: bytes {first}-{last}/"
        head += f'{len(self.data)}\nETag: "it"'
        return self.link.passing(response(head, self.data[first : last + 1]))


@dataclass(frozen=True)
class Row:
    case: str
    hosts: int
    ready_s: float
    worst_read_s: float
    origin_times: float
    failed: int
    wrong: int


@dataclass
class Reader:
    """What a host has found."""

    worst_ms: float = 0.0
    failed: int = 0
    wrong: int = 0

    def read(self, shell: FetchShell, source: int, data: bytes) -> None:
        for first in range(0, len(data), WINDOW * UNIT):
            ats = range(first, min(first + WINDOW * UNIT, len(data)), UNIT)
            reads = {
                shell.begin(source, at, UNIT, deadline_s=DEADLINE_S): at for at in ats
            }
            for number, answer in shell.finish().items():
                at = reads[number]
                self.worst_ms = max(self.worst_ms, answer.ms)
                self.failed += answer.result != 0
                self.wrong += answer.result == 0 and answer.data != data[at : at + UNIT]


@dataclass(frozen=True)
class Site:
    """Where hosts and nodes run; None: all on loopback."""

    count: int
    network: Network | None

    def machines(self, count: int) -> list[Machine]:
        return [self.network.add() for _ in range(count)] if self.network else []


@contextmanager
def fleet(site: Site, mirror: dict[str, Any], size: int) -> Iterator[list[Any]]:
    build = PROJECT / "build" / "sanitized"
    inside = [each.inside for each in site.machines(site.count)]
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        made = []
        for number in range(site.count):
            log = Path(logs, str(number))
            with inside[number]() if inside else nullcontext():
                shell = stack.enter_context(fetch_shell(build, log=log))
            source = shell.add({"size": size, "unit": UNIT, "mirrors": [mirror]})
            shell.pin(source, 'etag "it"')
            made.append((shell, source))
        yield made


def measure(
    case: str,
    site: Site,
    mirror: dict[str, Any],
    origin: Origin,
    event: Callable[[], None] | None = None,
) -> Row:
    before = origin.link.sent
    readers = [Reader() for _ in range(site.count)]
    with fleet(site, mirror, len(origin.data)) as shells:
        threads = [
            threading.Thread(target=reader.read, args=(*shell, origin.data))
            for reader, shell in zip(readers, shells, strict=True)
        ]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        if event is not None:
            time.sleep(0.5)
            event()
        for thread in threads:
            thread.join()
        ready_s = time.monotonic() - began_s
    return Row(
        case,
        site.count,
        round(ready_s, 2),
        round(max(reader.worst_ms for reader in readers) / 1e3, 2),
        round((origin.link.sent - before) / len(origin.data), 2),
        sum(reader.failed for reader in readers),
        sum(reader.wrong for reader in readers),
    )


def rows(site: Site, origin: Origin, server: ScriptedServer) -> Iterator[Row]:
    direct = {"kind": "http", "url": server.url()}
    keys: dict[str, Any] = {
        "origins": [server.url("").rstrip("/")],
        "slice_bytes": UNIT,
    }

    machines: list[Machine] = []

    @contextmanager
    def new_ring() -> Iterator[tuple[Ring, dict[str, Any]]]:
        machines[:] = site.machines(NODES)
        with tempfile.TemporaryDirectory() as root:
            with ring(Path(root), NODES, machines, **keys) as nodes:
                yield nodes, direct | {"via": nodes.urls}

    yield measure("direct", site, direct, origin)
    with new_ring() as (nodes, mirror):
        yield measure("ring, cold", site, mirror, origin)
        yield measure("ring, warm", site, mirror, origin)
        origin.alive = False
        yield measure("ring, warm, origin gone", site, mirror, origin)
        origin.alive = True
    with new_ring() as (nodes, mirror):
        kill = partial(nodes.kill, 1)
        yield measure("ring, cold, a node killed", site, mirror, origin, kill)
    with new_ring() as (nodes, mirror):
        silence = partial(nodes.silence, 1)
        yield measure("ring, cold, a node silent", site, mirror, origin, silence)
    if site.network is not None:
        with new_ring() as (nodes, mirror):
            vanish = machines[1].unplug
            yield measure("ring, cold, a node vanished", site, mirror, origin, vanish)


@click.command()
@click.option("--hosts", "count", type=click.IntRange(1, 64), default=32)
@click.option("--size", default="20M", help="Of the object.")
@click.option("--rate", default="100M", help="Of the origin's link, bits per second.")
@click.option("--loopback", is_flag=True, help="No namespaces: all on loopback.")
@click.option(
    "--cases", type=click.IntRange(1), metavar="N", help="Only the first ones."
)
@click.option("--json", "as_json", is_flag=True, help="One object per line.")
def command(
    count: int,
    size: str,
    rate: str,
    loopback: bool,
    cases: int | None,
    as_json: bool,
) -> None:
    """Have many hosts read one object, from its origin and through a ring."""
    units = max(1, parse_size(size, what="--size") // UNIT)
    data = b"".join(
        hashlib.sha256(b"%d" % number).digest() * (UNIT // 32)
        for number in range(units)
    )
    bits = parse_size(rate, what="--rate") / 1.048576  # M is 10^6 of a link
    with ExitStack() as stack:
        network, address = None, "127.0.0.1"
        inside: AbstractContextManager[None] = nullcontext()
        if not loopback:
            network = stack.enter_context(Network())
            machine = network.add(bits_per_s=bits)
            address, inside = machine.address, machine.inside()
        origin = Origin(data, Link(bits / 8 if loopback else math.inf))
        with inside:
            server = stack.enter_context(scripted_server(origin, address))
        site = Site(count, network)
        if not as_json:
            click.echo(_HEAD)
        faults, rounds = [], 0
        for row in islice(rows(site, origin, server), cases):
            rounds += 1
            if row.failed or row.wrong:
                faults.append(f"{row.case}: {row.failed} failed, {row.wrong} wrong")
            if as_json:
                click.echo(json.dumps(asdict(row)))
                continue
            cells = (
                f"{row.ready_s:7.2f}  {row.worst_read_s:7.2f}  {row.origin_times:5.2f}x"
            )
            click.echo(
                f"{row.case:27} {row.hosts:5}  {cells}  {row.failed:3}  {row.wrong:5}"
            )
        campaign.conclude(faults, rounds=rounds)


if __name__ == "__main__":
    run_command(command, name="fleet.py")
