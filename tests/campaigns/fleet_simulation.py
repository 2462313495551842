"""Simulates a fleet that no machine has: 10,000 hosts that start from one image.

``.venv/bin/python tests/campaigns/fleet_simulation.py`` prints a row for each case: how
long it takes until half, and 99 of 100, of the hosts have what they read, what the
origin sends as a multiple of that, and how many nodes of the ring hosts have asked.
What it assumes stands in docs/design/hosts.md.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import click
import simpy

from btrfs_ublk.base.entry import run_command
from btrfs_ublk.units import parse_size

UNIT = 256 << 10
#: Hosts choose a front for that many units of an object (csrc/lazy/choice.c).
CHOSEN_UNITS = 16
#: Reads that a host has in flight, as in fleet.py.
WINDOW = 8

_HEAD = (
    "case                                 hosts  nodes  half s  99 % s  origin  asked"
)


@dataclass(frozen=True)
class Fleet:
    """Rates are bytes per second. ``nodes`` 0: there is no ring. What hosts read lies
    in the first ``object_bytes`` of an object, in one piece if they are as many.
    ``choice``: hosts choose a front for each part of the object, as ours do, or each
    host has one of its own."""

    hosts: int = 10_000
    read_bytes: int = 20_000_000
    object_bytes: int = 20_000_000
    nodes: int = 50
    origin_rate: float = 1.25e9
    node_rate: float = 1.25e9
    host_rate: float = 1.25e9
    node_cpus: int = 8
    #: What a slice costs nginx: from its cache, and when it is fetched.
    warm_cpu_s: float = 0.2e-3
    cold_cpu_s: float = 0.98e-3
    site_rtt_s: float = 0.5e-3
    origin_rtt_s: float = 20e-3
    warm: bool = False
    choice: str = "part"
    seed: int = 1


@dataclass(frozen=True)
class Outcome:
    half_s: float
    most_s: float
    origin_times: float
    fronts: int


@dataclass
class Line:
    """What takes things one after the other: a link, or CPUs."""

    env: simpy.Environment
    rate: float
    sent: float = 0.0
    _free_s: float = 0.0

    def wait_s(self, amount: float) -> float:
        """Return how long it takes until this has passed, behind all before it."""
        self.sent += amount
        self._free_s = max(self._free_s, self.env.now) + amount / self.rate
        return self._free_s - float(self.env.now)


@dataclass
class Node:
    cpu: Line
    link: Line
    stored: dict[int, simpy.Event] = field(default_factory=dict)

    def send_s(self, cpu_s: float) -> float:
        return max(self.cpu.wait_s(cpu_s), self.link.wait_s(UNIT))


class _Run:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.env = fleet, simpy.Environment()
        self.origin = Line(self.env, fleet.origin_rate)
        self.nodes = [
            Node(Line(self.env, fleet.node_cpus), Line(self.env, fleet.node_rate))
            for _ in range(fleet.nodes)
        ]
        chance = random.Random(fleet.seed)
        count = -(-fleet.read_bytes // UNIT)
        there = max(count, fleet.object_bytes // UNIT)
        self.units = sorted(chance.sample(range(there), count))
        self.fronts: set[int] = set()
        self._places: dict[object, int] = {}
        self.ready_s: list[float] = []

    def outcome(self) -> Outcome:
        for number in range(self.fleet.hosts):
            self.env.process(self._host(number))
        self.env.run()
        ready, count = sorted(self.ready_s), self.fleet.hosts
        assert len(ready) == count
        return Outcome(
            ready[count // 2],
            ready[-(-count * 99 // 100) - 1],
            self.origin.sent / (len(self.units) * UNIT),
            len(self.fronts),
        )

    def _host(self, number: int) -> Generator[simpy.Event, Any, None]:
        link, rest = Line(self.env, self.fleet.host_rate), iter(self.units)
        readers = [self._reader(number, rest, link) for _ in range(WINDOW)]
        yield self.env.all_of([self.env.process(reader) for reader in readers])
        self.ready_s.append(float(self.env.now))

    def _reader(
        self, number: int, rest: Iterator[int], link: Line
    ) -> Generator[simpy.Event, Any, None]:
        for unit in rest:
            if self.nodes:
                yield from self._by_ring(number, unit)
            else:
                yield from self._by_origin()
            yield self.env.timeout(link.wait_s(UNIT))

    def _by_origin(self) -> Generator[simpy.Event, Any, None]:
        wait_s = self.fleet.origin_rtt_s + self.origin.wait_s(UNIT)
        yield self.env.timeout(wait_s)

    def _by_ring(self, number: int, unit: int) -> Generator[simpy.Event, Any, None]:
        own = self.fleet.choice == "host"
        front = self._placed(
            f"host {number}" if own else f"part {unit // CHOSEN_UNITS}"
        )
        store = self._placed(unit)
        self.fronts.add(front)
        yield from self._stored(self.nodes[store], unit)
        if store != front:
            sent_s = self.nodes[store].send_s(self.fleet.warm_cpu_s)
            yield self.env.timeout(self.fleet.site_rtt_s + sent_s)
        sent_s = self.nodes[front].send_s(self.fleet.warm_cpu_s)
        yield self.env.timeout(self.fleet.site_rtt_s + sent_s)

    def _stored(self, node: Node, unit: int) -> Generator[simpy.Event, Any, None]:
        """Wait until a store has a unit: the first one has it fetched."""
        there = node.stored.get(unit)
        if self.fleet.warm or (there is not None and there.processed):
            return
        if there is not None:
            yield there
            return
        node.stored[unit] = self.env.event()
        yield self.env.timeout(node.cpu.wait_s(self.fleet.cold_cpu_s))
        yield from self._by_origin()
        node.stored[unit].succeed()

    def _placed(self, key: object) -> int:
        """Return the node that a hash gives."""
        if key not in self._places:
            digest = hashlib.sha256(str(key).encode()).digest()
            self._places[key] = int.from_bytes(digest[:8], "big") % len(self.nodes)
        return self._places[key]


def simulate(fleet: Fleet) -> Outcome:
    """Return what becomes of a fleet; the same one has the same outcome."""
    return _Run(fleet).outcome()


def cases(fleet: Fleet) -> Iterator[tuple[str, Fleet]]:
    scattered = replace(fleet, object_bytes=100 * fleet.read_bytes)
    yield "direct", replace(fleet, nodes=0)
    yield "ring, cold", fleet
    yield "ring, warm", replace(fleet, warm=True)
    yield "ring, cold, scattered reads", scattered
    yield "ring, warm, scattered reads", replace(scattered, warm=True)
    own = replace(fleet, choice="host")
    yield "ring, cold, a front for each host", own
    yield "ring, warm, a front for each host", replace(own, warm=True)


@click.command()
@click.option("--hosts", type=click.IntRange(1, 100_000), default=10_000)
@click.option("--nodes", type=click.IntRange(1, 1000), default=50)
@click.option("--read", default="20000000", help="Bytes that each host reads.")
@click.option("--json", "as_json", is_flag=True, help="One object per line.")
def command(hosts: int, nodes: int, read: str, as_json: bool) -> None:
    """Simulate a fleet, direct and through a ring of site caches."""
    read_bytes = parse_size(read, what="--read")
    fleet = Fleet(
        hosts=hosts, nodes=nodes, read_bytes=read_bytes, object_bytes=read_bytes
    )
    if not as_json:
        click.echo(_HEAD)
    for case, each in cases(fleet):
        found = simulate(each)
        if as_json:
            click.echo(json.dumps({"case": case, **asdict(each), **asdict(found)}))
            continue
        click.echo(
            f"{case:36} {each.hosts:5}  {each.nodes:5}  {found.half_s:6.2f}"
            f"  {found.most_s:6.2f}  {found.origin_times:5.0f}x  {found.fronts:5}"
        )


if __name__ == "__main__":
    run_command(command, name="fleet_simulation.py")
