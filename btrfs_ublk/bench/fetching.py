"""How fast data arrive when they are read for the first time, over HTTP on loopback.

``python -m btrfs_ublk.bench.fetching --help``
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import cast

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.fault_proxy import FaultProxy
from btrfs_ublk.bench.fio import Fio, parse_output, random_read_argv
from btrfs_ublk.bench.origin import NGINX, origin
from btrfs_ublk.bench.report import (
    Document,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.bench.stats import grouped
from btrfs_ublk.capabilities import LOOP, ROOT, Program, require
from btrfs_ublk.entry import json_option, run_command
from btrfs_ublk.lazy import Addition, Digests, digest_file
from btrfs_ublk.process import run, spawn
from btrfs_ublk.resources.tempdir import tempdir
from btrfs_ublk.server import (
    BlockServer,
    Description,
    FrontEndName,
    LazySegment,
    MemsetSegment,
)
from btrfs_ublk.units import KIB, MIB, format_size

CURL = Program("curl", package="curl")
TC = Program("tc", package="iproute2")
_ENGINE = "io_uring"
_UNITS = (4 * KIB, 16 * KIB, 64 * KIB)
_SEQUENTIAL_UNIT = 256 * KIB
_DEPTHS = (1, 64)
_RAMP_S = 0.5
_TIMEOUT_S = 600.0
_BARE_REQUESTS = 300

_Cell = tuple[Callable[[Result], float], int]


@dataclass(frozen=True)
class Bed:
    """An object of random bytes, its server, and where to put things."""

    root: Path
    path: Path
    origin: tuple[str, int]
    size_bytes: int
    front_end: FrontEndName
    digests: dict[int, Digests] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Of the object."""
        return "http://{}:{}/object".format(*self.origin)

    def digests_of(self, unit_bytes: int) -> Digests:
        """Read once: the object may be large."""
        if unit_bytes not in self.digests:
            found = digest_file(self.path, unit_bytes=unit_bytes)
            self.digests[unit_bytes] = found
        return self.digests[unit_bytes]

    @contextmanager
    def front_end_alone(self) -> Iterator[Path]:
        """As large, and nothing is fetched: one repeated byte."""
        segment = MemsetSegment(offset=0, length=self.size_bytes, byte=97)
        description = Description(self.size_bytes, [segment])
        with BlockServer(description, front_end=self.front_end) as server:
            yield server.device

    @contextmanager
    def device(self, unit_bytes: int) -> Iterator[Path]:
        """All of it, verified with digests, not cached."""
        name = f"map-{unit_bytes}-{time.monotonic_ns()}"
        segment = LazySegment(
            offset=0, length=self.size_bytes, map=str(self.root / name)
        )
        digests = self.digests_of(unit_bytes)
        digests.write(self.root / "digests")
        source = {
            "kind": "http",
            "url": self.url,
            "proxy": "none",
            "size": self.size_bytes,
            "unit": unit_bytes,
            "digests": {"path": str(self.root / "digests")},
            "root": digests.root,
        }
        description = Description(self.size_bytes, [segment])
        with BlockServer(description, front_end=self.front_end) as server:
            server.map_add([source], [Addition(offset=0, length=self.size_bytes)])
            yield server.device


@contextmanager
def bed(parent: Path, *, size_bytes: int, front_end: FrontEndName) -> Iterator[Bed]:
    """What is measured, on a directory in memory."""
    with ExitStack() as stack:
        root = stack.enter_context(tempdir(parent=parent))
        served = root / "served"
        served.mkdir()
        chance = random.Random(1)
        with (served / "object").open("wb") as file:
            for _ in range(size_bytes // MIB):
                file.write(chance.randbytes(MIB))
        server = stack.enter_context(origin(root, served))
        yield Bed(root, served / "object", server, size_bytes, front_end)


def _random_reads(place: Bed, device: Path, *, depth: int, runtime_s: float) -> Result:
    output = place.root / "fio.json"
    argv = random_read_argv(
        device,
        size_bytes=place.size_bytes,
        engine=_ENGINE,
        depth=depth,
        direct=True,
        jobs=1,
        ramp_s=_RAMP_S,
        runtime_s=runtime_s,
        output=output,
    )
    run(argv, timeout_s=_TIMEOUT_S)
    outcome = parse_output(output.read_text(encoding="utf-8"))
    return {"iops": outcome.total_iops, "p50_us": outcome.latency_us["p50"]}


def _bare_requests(place: Bed, unit_bytes: int) -> float:
    """Microseconds: the median of range requests of one curl, on one connection."""
    chance = random.Random(2)
    lines = []
    for _ in range(_BARE_REQUESTS):
        start = chance.randrange(place.size_bytes // unit_bytes) * unit_bytes
        lines += [f'url = "{place.url}"', f"range = {start}-{start + unit_bytes - 1}"]
        lines += ["output = /dev/null", 'write-out = "%{time_total}\\n"', "silent"]
        lines += ['noproxy = "*"', "next"]
    done = run(
        ["curl", "--config", "-"],
        input="\n".join(lines[:-1]),
        timeout_s=_TIMEOUT_S,
    )
    return median(float(line) for line in done.stdout.split()) * 1e6


def _hash_us(unit_bytes: int) -> float:
    """Microseconds: the median of hashing a unit, which each first read does."""
    unit = random.Random(3).randbytes(unit_bytes)
    took_ns = []
    for _ in range(_BARE_REQUESTS):
        start_ns = time.perf_counter_ns()
        hashlib.sha256(unit).digest()
        took_ns.append(time.perf_counter_ns() - start_ns)
    return median(took_ns) / 1e3


def measure_random(
    place: Bed, unit_bytes: int, *, runtime_s: float, turns: int
) -> list[Result]:
    """4 KiB at a time, each in a unit that has to be fetched; by turns with reads that
    the same front end answers at once, and bare requests.
    """
    found = []
    with place.device(unit_bytes) as device, place.front_end_alone() as alone:
        for _ in range(turns):
            result = _random_reads(place, device, depth=1, runtime_s=runtime_s)
            front_end = _random_reads(place, alone, depth=1, runtime_s=runtime_s / 2)
            result["bare_us"] = _bare_requests(place, unit_bytes)
            result["front_end_us"] = front_end["p50_us"]
            result["sha256_us"] = _hash_us(unit_bytes)
            found.append({"what": "random", "unit": unit_bytes} | result)
    return found


def measure_far(place: Bed, *, runtime_s: float) -> Result:
    """One reader, and many: where the network is far away, many should be that many
    times as fast.
    """
    iops = {}
    with place.device(_UNITS[0]) as device:
        for depth in _DEPTHS:
            read = _random_reads(place, device, depth=depth, runtime_s=runtime_s)
            iops[depth] = read["iops"]
    one, many = (iops[depth] for depth in _DEPTHS)
    return {"what": "far", "one_iops": one, "many_iops": many}


def _seconds(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def measure_sequential(place: Bed) -> Result:
    """All of it, by dd, and by curl with sha256sum at its side."""
    with place.device(_SEQUENTIAL_UNIT) as device:
        dd = [f"if={device}", "of=/dev/null", "bs=1M", "status=none"]
        ours_s = _seconds(lambda: run(["dd", *dd], timeout_s=_TIMEOUT_S))

    def curl() -> None:
        with spawn(["sha256sum", place.path]) as sha256sum:
            run(
                ["curl", "-s", "--noproxy", "*", "-o", "/dev/null", place.url],
                timeout_s=_TIMEOUT_S,
            )
            sha256sum.wait(_TIMEOUT_S)

    return {"what": "sequential", "ours_s": ours_s, "curl_s": _seconds(curl)}


def _medians(results: list[Result], cells: Sequence[_Cell]) -> tuple[str, ...]:
    """Of all turns: each a number of a turn, and how many digits of it to show."""
    middles = ((median(value(turn) for turn in results), dig) for value, dig in cells)
    return str(len(results)), *(number(middle, dig) for middle, dig in middles)


def _without_shares(turn: Result) -> float:
    own_us: float = turn["p50_us"] - turn["front_end_us"] - turn["sha256_us"]
    return own_us


_RANDOM_CELLS: Sequence[_Cell] = (
    (lambda turn: turn["p50_us"], 1),
    (lambda turn: turn["front_end_us"], 1),
    (lambda turn: turn["sha256_us"], 1),
    (lambda turn: turn["bare_us"], 1),
    (lambda turn: turn["p50_us"] / turn["bare_us"], 2),
    (lambda turn: _without_shares(turn) / turn["bare_us"], 2),
)


def _latency_rows(results: list[Result]) -> list[tuple[str, ...]]:
    """One for each unit."""
    rows: list[tuple[str, ...]] = []
    for unit_bytes, turns in grouped(results, lambda turn: turn["unit"]).items():
        rows.append((format_size(unit_bytes), *_medians(turns, _RANDOM_CELLS)))
    return rows


def tables(document: Document) -> list[Table]:
    """One for each kind of measurement that was made."""
    results = document["results"]
    size_bytes = document["parameters"]["size_bytes"]
    found = []
    sequential = [each for each in results if each["what"] == "sequential"]
    if sequential:
        cells: Sequence[_Cell] = (
            (lambda turn: size_bytes / turn["ours_s"] / MIB, 0),
            (lambda turn: size_bytes / turn["curl_s"] / MIB, 0),
            (lambda turn: turn["curl_s"] / turn["ours_s"], 2),
        )
        note = "MiB/s, medians; curl has sha256sum at its side. No cache."
        heads: tuple[str, ...] = ("object", "turns", "device", "curl", "ratio")
        row = (format_size(size_bytes), *_medians(sequential, cells))
        found.append(Table("Cold sequential read", heads, [row], 1, note))
    latencies = _latency_rows([each for each in results if each["what"] == "random"])
    if latencies:
        heads = ("unit", "turns", "device", "front end", "SHA-256", "curl")
        note = (
            "Median us: a 4 KiB read; one that the same front end answers at once; to "
            "hash a unit; a range request of it, connection kept. Ratio: of device and "
            "curl; fetching: the same without what front end and hashing take."
        )
        title = "Cold random reads, one at a time"
        heads = (*heads, "ratio", "fetching")
        found.append(Table(title, heads, latencies, 1, note))
    far = [
        (
            number(result["one_iops"], 1),
            number(result["many_iops"], 1),
            number(result["many_iops"] / result["one_iops"], 1),
        )
        for result in results
        if result["what"] == "far"
    ]
    if far:
        readers = ("1 reader", f"{_DEPTHS[1]} readers", "ratio")
        note = (
            f"Reads of 4 KiB per second; {document['parameters']['round_trip_ms']} ms "
            "of round trip."
        )
        found.append(Table("Far away", readers, far, 0, note))
    return found


@contextmanager
def _proxied(place: Bed, round_trip_ms: int) -> Iterator[Bed]:
    """The same behind a proxy that waits before it answers."""
    with FaultProxy(place.origin, latency_s=round_trip_ms / 1e3) as proxy:
        yield replace(place, origin=("127.0.0.1", proxy.port))


@contextmanager
def _delayed(place: Bed, round_trip_ms: int) -> Iterator[Bed]:
    """On loopback: half of it each way."""
    netem = ["dev", "lo", "root", "netem"]
    delay = [*netem, "limit", "100000", "delay", f"{round_trip_ms / 2:g}ms"]
    require(TC)
    run(["tc", "qdisc", "add", *delay], timeout_s=_TIMEOUT_S)
    try:
        yield place
    finally:
        run(["tc", "qdisc", "del", *netem], timeout_s=_TIMEOUT_S)


_DELAYS = {"netem": _delayed, "proxy": _proxied}


@click.command(context_settings=options.SETTINGS)
@click.option(
    "--what",
    "kinds",
    type=click.Choice(["sequential", "random", "far"]),
    multiple=True,
    default=("sequential", "random"),
)
@options.size_option("256M")
@click.option("--runtime", "runtime_s", type=click.FloatRange(min=0.1), default=3.0)
@click.option("--repeat", "repeats", type=options.COUNT, default=1)
@click.option(
    "--round-trip",
    "round_trip_ms",
    type=click.IntRange(1, 1000),
    default=20,
    help="Of far, in ms.",
)
@click.option(
    "--delay",
    type=click.Choice(list(_DELAYS)),
    default="netem",
    help="What delays: netem(8), all of loopback, so only in a VM, or in a network "
    "namespace of its own (unshare --net; ip link set lo up); or a proxy, in Python.",
)
@options.front_end_option
@options.memory_directory_option
@json_option
def command(
    kinds: tuple[str, ...],
    size_bytes: int,
    runtime_s: float,
    repeats: int,
    round_trip_ms: int,
    delay: str,
    front_end: str,
    parent: Path,
    as_json: bool,
) -> None:
    """Cold reads of a lazy device, held against curl: all data are fetched over HTTP,
    and verified, each time.
    """
    require(ROOT, LOOP, NGINX, CURL, Fio(_ENGINE))
    parameters = {
        "size_bytes": size_bytes,
        "round_trip_ms": round_trip_ms,
        "delay": delay,
    }
    document = make_document(
        "fetching", parameters=parameters, directory=parent, results=[]
    )
    results = document["results"]
    name = cast(FrontEndName, front_end)
    with bed(parent, size_bytes=size_bytes, front_end=name) as place:
        if "random" in kinds:
            for unit_bytes in _UNITS:
                results += measure_random(
                    place, unit_bytes, runtime_s=runtime_s, turns=repeats
                )
        for _ in range(repeats):
            if "sequential" in kinds:
                results.append(measure_sequential(place))
            if "far" in kinds:
                with _DELAYS[delay](place, round_trip_ms) as far:
                    results.append(measure_far(far, runtime_s=runtime_s))
    finish(document, as_json=as_json)


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.fetching")
