"""Has many hosts read one object, from its origin and through a ring of site caches.

``scripts/torture fleet --hosts 8 --size 20M --rate 100M`` prints a row for each case:
how long it took until all hosts had all, the longest read, what the origin has sent as
a multiple of the object, and reads that failed or were wrong.

A host is a process with the fetcher of the block server (fetch-shell), without a
device; nodes are processes of nginx. Where a node is wrong, hosts have digests, and one
read in flight each (engine-shell). Each has a network namespace of its own on one
bridge, and the origin's link has a limit (tbf), of bits per second that all its
responses share. So bytes, errors and ratios say something; times do where the link is
what takes them, and not this machine's CPUs. For times, ``--build`` names a build
without sanitizers.
"""

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import campaign
import click
from campaign import Run
from support.shells import EngineShell, FetchShell, StoreShell, describe
from support.sites import Machine, Network, Ring, ring
from support.web_servers import ScriptedServer, ranged, response, scripted_server

from btrfs_ublk.base.entry import run_command
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.study import Column, listing
from btrfs_ublk.units import parse_size

PROJECT = Path(__file__).parents[2]

UNIT = 256 << 10
NODES = 3
#: Reads that a host has in flight.
WINDOW = 8
DEADLINE_S = 30
_PIECE = 32 << 10


@dataclass
class Origin:
    data: bytes
    alive: bool = True
    sent: int = 0

    def __call__(self, request: str) -> bytes | Iterator[bytes]:
        if not self.alive:
            return b""
        if request.startswith("HEAD ") or "range:" not in request.lower():
            return response('200 OK\nETag: "it"', length=len(self.data))
        return self._counted(ranged(request, self.data, 'ETag: "it"'))

    def _counted(self, answer: bytes) -> Iterator[bytes]:
        for at in range(0, len(answer), _PIECE):
            yield answer[at : at + _PIECE]
            self.sent += len(answer[at : at + _PIECE])


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

    def read_device(self, shell: EngineShell, data: bytes) -> None:
        """The same of a device, one unit after the other."""
        for at in range(0, len(data), UNIT):
            began_s = time.monotonic()
            answer = shell.request(f"read {at} {UNIT}")
            self.worst_ms = max(self.worst_ms, (time.monotonic() - began_s) * 1e3)
            self.failed += isinstance(answer, int)
            self.wrong += isinstance(answer, bytes) and answer != data[at : at + UNIT]


@contextmanager
def _directory() -> Iterator[Path]:
    """Yield a new one. That of a fleet that is killed stays, without a ledger."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@dataclass(frozen=True)
class Site:
    """Where hosts and nodes run, and whose programs."""

    count: int
    network: Network
    build: Path

    def machines(self, count: int) -> list[Machine]:
        return [self.network.add() for _ in range(count)]


#: Reads all of a host.
_Read = Callable[[Reader], None]


@contextmanager
def fleet(site: Site, mirror: dict[str, Any], data: bytes) -> Iterator[list[_Read]]:
    machines = site.machines(site.count)
    with _directory() as logs, ExitStack() as stack:
        made: list[_Read] = []
        for number, machine in enumerate(machines):
            log = logs / str(number)
            with machine.inside():
                shell = stack.enter_context(FetchShell(site.build, log=log))
            source = shell.add({"size": len(data), "unit": UNIT, "mirrors": [mirror]})
            if mirror["kind"] == "http":
                shell.pin(source, 'etag "it"')
                # Its fetch process starts now: hosts do that on CPUs of their own.
                shell.ask({"probe": 1, "source": source, "timeout_ms": 9000})
            made.append(partial(Reader.read, shell=shell, source=source, data=data))
        yield made


@contextmanager
def devices(site: Site, mirror: dict[str, Any], data: bytes) -> Iterator[list[_Read]]:
    """The same hosts with digests of all units, each with a map of its own."""
    digests = [
        hashlib.sha256(data[at : at + UNIT]).hexdigest()
        for at in range(0, len(data), UNIT)
    ]
    source = {"size": len(data), "unit": UNIT, "digests": digests, **mirror}
    machines = site.machines(site.count)
    with _directory() as maps, ExitStack() as stack:
        made: list[_Read] = []
        for number, machine in enumerate(machines):
            path = maps / str(number)
            with StoreShell(site.build, path) as store:
                store.add([[0, len(data), 0, 0]], source)
            lazy = {"kind": "lazy", "length": len(data), "map": str(path)}
            with machine.inside():
                shell = stack.enter_context(
                    EngineShell(site.build, describe(lazy), log=Path(f"{path}.log"))
                )
            made.append(partial(Reader.read_device, shell=shell, data=data))
        yield made


def measure(
    case: str,
    site: Site,
    mirror: dict[str, Any],
    origin: Origin,
    event: Callable[[], None] | None = None,
    *,
    hosts: Callable[..., AbstractContextManager[list[_Read]]] = fleet,
) -> Result:
    readers = [Reader() for _ in range(site.count)]
    with hosts(site, mirror, origin.data) as made:
        threads = [
            threading.Thread(target=read, args=(reader,))
            for reader, read in zip(readers, made, strict=True)
        ]
        before, began_s = origin.sent, time.monotonic()
        for thread in threads:
            thread.start()
        if event is not None:
            time.sleep(0.5)
            event()
        for thread in threads:
            thread.join()
        ready_s = time.monotonic() - began_s
    result = {
        "case": case,
        "hosts": site.count,
        "ready_s": ready_s,
        "worst_s": max(reader.worst_ms for reader in readers) / 1e3,
        "origin_times": (origin.sent - before) / len(origin.data),
        "failed": sum(reader.failed for reader in readers),
        "wrong": sum(reader.wrong for reader in readers),
    }
    problems = [f"{case}: {result[x]} {x}" for x in ("failed", "wrong") if result[x]]
    return result | {"problems": problems}


def cases(
    site: Site, origin: Origin, server: ScriptedServer
) -> Iterator[Callable[[], Result]]:
    """Yield what measures the cases; those of a ring are built on each other."""
    direct = {"kind": "http", "url": server.url()}
    keys: dict[str, Any] = {
        "origins": [server.url("").rstrip("/")],
        "slice_bytes": UNIT,
    }

    machines: list[Machine] = []

    @contextmanager
    def new_ring() -> Iterator[tuple[Ring, dict[str, Any]]]:
        machines[:] = site.machines(NODES)
        with _directory() as root:
            with ring(root, NODES, machines, **keys) as nodes:
                yield nodes, direct | {"via": nodes.urls}

    yield lambda: measure("direct", site, direct, origin)
    with new_ring() as (nodes, mirror):
        warm = partial(measure, site=site, mirror=mirror, origin=origin)
        yield lambda: warm("ring, cold")
        yield lambda: warm("ring, warm")
        origin.alive = False
        yield lambda: warm("ring, warm, origin gone")
        origin.alive = True
        spoil(nodes, 1)
        case = "ring, warm, a node is wrong"
        yield lambda: warm(case, hosts=devices)
    with new_ring() as (nodes, mirror):
        kill = partial(nodes.kill, 1)
        case = "ring, cold, a node killed"
        yield lambda: measure(case, site, mirror, origin, kill)
    with new_ring() as (nodes, mirror):
        silence = partial(nodes.silence, 1)
        case = "ring, cold, a node silent"
        yield lambda: measure(case, site, mirror, origin, silence)
    with new_ring() as (nodes, mirror):
        case, vanish = "ring, cold, a node vanished", machines[1].unplug
        yield lambda: measure(case, site, mirror, origin, vanish)


def spoil(nodes: Ring, number: int) -> None:
    """Change the last bytes of all that a node has stored."""
    for path in nodes.roots[number].glob("cache/*/*/*"):
        with open(path, "r+b") as file:
            file.seek(-1000, os.SEEK_END)
            file.write(bytes(1000))


def tables(document: Document) -> list[Table]:
    columns = (
        *(Column("case", "case"), Column("hosts", "hosts")),
        *(Column("ready s", "ready_s", 2), Column("worst read s", "worst_s", 2)),
        Column("the origin sent, times", "origin_times", 2),
        *(Column("failed", "failed"), Column("wrong", "wrong")),
    )
    return [listing("Hosts that read one object", document["results"], columns)]


@campaign.command(
    "fleet",
    click.option("--hosts", "host_count", type=click.IntRange(1, 64), default=32),
    click.option("--size", default="20M", help="Of the object."),
    click.option(
        "--rate", default="100M", help="Of the origin's link, bits per second."
    ),
    click.option(
        "--build",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        default=PROJECT / "build/sanitized",
        help="Where programs of hosts are: the tests' build with sanitizers.",
    ),
    click.option(
        "--cases", "first", type=click.IntRange(1), metavar="N", help="The first ones."
    ),
    tables=tables,
    seeded=False,
    has_directory=False,
    recorded=("host_count", "size", "rate"),
)
def command(
    run: Run, host_count: int, size: str, rate: str, build: Path, first: int | None
) -> None:
    """Have many hosts read one object, from its origin and through a ring."""
    units = max(1, parse_size(size, what="--size") // UNIT)
    data = b"".join(
        hashlib.sha256(b"%d" % number).digest() * (UNIT // 32)
        for number in range(units)
    )
    bits = parse_size(rate, what="--rate") / 1.048576  # M is 10^6 of a link
    network = run.stack.enter_context(Network())
    machine = network.add(bits_per_s=bits)
    origin = Origin(data)
    with machine.inside():
        server = run.stack.enter_context(scripted_server(origin, machine.address))
    for measured in islice(
        cases(Site(host_count, network, build), origin, server), first
    ):
        run.add(measured())
        options.progress(run.document["results"][-1]["case"])


if __name__ == "__main__":
    run_command(command, name="fleet.py")
