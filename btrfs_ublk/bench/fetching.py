"""How fast data arrive that are read for the first time, over HTTP on loopback.

``python -m btrfs_ublk.bench.fetching --help``
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click

from btrfs_ublk.base.capabilities import LOOP, ROOT, Fio, Program, require
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.base.process import spawn
from btrfs_ublk.bench import options
from btrfs_ublk.bench.fio import random_reads
from btrfs_ublk.bench.origin import NGINX, origin
from btrfs_ublk.bench.report import Document, Result, Table, number
from btrfs_ublk.bench.stats import grouped
from btrfs_ublk.bench.study import TURNS, Column, Run, study, table
from btrfs_ublk.content import Addition, Digests, digest_file
from btrfs_ublk.kernel.temporary import tempdir
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
_UNITS = (4 * KIB, 16 * KIB, 64 * KIB)
_SEQUENTIAL_UNIT = 256 * KIB
_DEPTHS = (1, 64)
_RAMP_S = 0.5
_TIMEOUT_S = 600.0
_BARE_REQUESTS = 300


@dataclass(frozen=True)
class Bed:
    """An object of random bytes, its server, and a directory for other files."""

    root: Path
    path: Path
    origin: tuple[str, int]
    size_bytes: int
    front_end: FrontEndName
    digests: dict[int, Digests] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The URL of the object."""
        return "http://{}:{}/object".format(*self.origin)

    def digests_of(self, unit_bytes: int) -> Digests:
        """Compute the digests once, as the object may be large."""
        if unit_bytes not in self.digests:
            found = digest_file(self.path, unit_bytes=unit_bytes)
            self.digests[unit_bytes] = found
        return self.digests[unit_bytes]

    @contextmanager
    def front_end_alone(self) -> Iterator[Path]:
        """Serve a device of the same size that fetches nothing: one repeated byte."""
        segment = MemsetSegment(offset=0, length=self.size_bytes, byte=97)
        description = Description(self.size_bytes, [segment])
        with BlockServer(description, front_end=self.front_end) as server:
            yield server.device

    @contextmanager
    def device(self, unit_bytes: int) -> Iterator[Path]:
        """Serve the whole object, verified with digests and not cached."""
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
    """Make what is measured, in a directory in memory."""
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
    outcome = random_reads(
        device,
        size_bytes=place.size_bytes,
        depth=depth,
        runtime_s=runtime_s,
        ramp_s=_RAMP_S,
        output=place.root / "fio.json",
    )
    return {"iops": outcome.total_iops, "p50_us": outcome.latency_us["p50"]}


def _bare_requests(place: Bed, unit_bytes: int) -> float:
    """Return the median of one curl's range requests on one connection, in us."""
    chance = random.Random(2)
    lines = []
    for _ in range(_BARE_REQUESTS):
        start = chance.randrange(place.size_bytes // unit_bytes) * unit_bytes
        lines += [f'url = "{place.url}"', f"range = {start}-{start + unit_bytes - 1}"]
        lines += ["output = /dev/null", 'write-out = "%{time_total}\\n"', "silent"]
        lines += ['noproxy = "*"', "next"]
    done = run_program(
        ["curl", "--config", "-"],
        input="\n".join(lines[:-1]),
        timeout_s=_TIMEOUT_S,
    )
    return median(float(line) for line in done.stdout.split()) * 1e6


def _hash_us(unit_bytes: int) -> float:
    """Return the median time to hash a unit, as each first read does, in us."""
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
    """Read 4 KiB at a time, each from a unit that has to be fetched, in turn with reads
    that the same front end answers at once, and bare requests.
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
    """Measure one reader and many: over a distant network, N readers should be N times
    as fast as one.
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
    """Read everything with dd, and with curl beside sha256sum."""
    with place.device(_SEQUENTIAL_UNIT) as device:
        dd = [f"if={device}", "of=/dev/null", "bs=1M", "status=none"]
        ours_s = _seconds(lambda: run_program(["dd", *dd], timeout_s=_TIMEOUT_S))

    def curl() -> None:
        with spawn(["sha256sum", place.path]) as sha256sum:
            run_program(
                ["curl", "-s", "--noproxy", "*", "-o", "/dev/null", place.url],
                timeout_s=_TIMEOUT_S,
            )
            sha256sum.wait(_TIMEOUT_S)

    return {"what": "sequential", "ours_s": ours_s, "curl_s": _seconds(curl)}


def _median(value: Callable[[Result], float]) -> Callable[[Sequence[Result]], float]:
    return lambda turns: float(median(value(turn) for turn in turns))


def _without_shares(turn: Result) -> float:
    own_us = turn["p50_us"] - turn["front_end_us"] - turn["sha256_us"]
    return float(own_us / turn["bare_us"])


_RANDOM = [
    TURNS,
    Column("device", "p50_us", 1),
    Column("front end", "front_end_us", 1),
    Column("SHA-256", "sha256_us", 1),
    Column("curl", "bare_us", 1),
    Column("ratio", _median(lambda turn: turn["p50_us"] / turn["bare_us"]), 2),
    Column("fetching", _median(_without_shares), 2),
]


def tables(document: Document) -> list[Table]:
    """Make a table for each kind of measurement that was made."""
    kinds = grouped(document["results"], lambda turn: turn["what"])
    given = document["parameters"]
    size_bytes = given["size_bytes"]
    found = []
    if "sequential" in kinds:

        def rate(key: str) -> Callable[[Sequence[Result]], float]:
            return _median(lambda turn: size_bytes / turn[key] / MIB)

        rates = [Column("device", rate("ours_s")), Column("curl", rate("curl_s"))]
        ratio = _median(lambda turn: turn["curl_s"] / turn["ours_s"])
        found.append(
            table(
                "Cold sequential read",
                kinds["sequential"],
                {"object": lambda _: format_size(size_bytes)},
                [TURNS, *rates, Column("ratio", ratio, 2)],
                note="MiB/s, medians; curl has sha256sum at its side. No cache.",
            )
        )
    if "random" in kinds:
        found.append(
            table(
                "Cold random reads, one at a time",
                kinds["random"],
                {"unit": lambda turn: format_size(turn["unit"])},
                _RANDOM,
                note="Median us: a 4 KiB read; one that the same front end answers at "
                "once; to hash a unit; a range request of it, connection kept. Ratio: "
                "of device and curl; fetching: the same without what front end and "
                "hashing take.",
            )
        )
    if "far" in kinds:
        rows = [
            [number(value, 1) for value in (one, many, many / one)]
            for turn in kinds["far"]
            for one, many in [(turn["one_iops"], turn["many_iops"])]
        ]
        note = f"Reads of 4 KiB per second; {given['round_trip_ms']} ms of round trip."
        heads = ("1 reader", f"{_DEPTHS[1]} readers", "ratio")
        found.append(Table("Far away", heads, rows, 0, note))
    return found


@contextmanager
def _delayed(round_trip_ms: int) -> Iterator[None]:
    """Delay all of loopback, by half of the round trip each way."""
    netem = ["dev", "lo", "root", "netem"]
    delay = [*netem, "limit", "100000", "delay", f"{round_trip_ms / 2:g}ms"]
    require(TC)
    run_program(["tc", "qdisc", "add", *delay], timeout_s=_TIMEOUT_S)
    try:
        yield
    finally:
        run_program(["tc", "qdisc", "del", *netem], timeout_s=_TIMEOUT_S)


@study(
    "fetching",
    click.option(
        *("--what", "kinds"),
        type=click.Choice(["sequential", "random", "far"]),
        multiple=True,
        default=("sequential", "random"),
    ),
    options.size_option("256M"),
    options.runtime_option(3.0),
    click.option(
        *("--round-trip", "round_trip_ms"),
        type=click.IntRange(1, 1000),
        default=20,
        help="Of far, in ms, by netem(8): in a VM, or a network namespace of its own "
        "(unshare --net; ip link set lo up).",
    ),
    options.front_end_option,
    needs=(ROOT, LOOP, NGINX, CURL, Fio("io_uring")),
    in_memory=True,
    recorded=("size_bytes", "round_trip_ms"),
)
def command(
    run: Run,
    kinds: Sequence[str],
    size_bytes: int,
    runtime_s: float,
    round_trip_ms: int,
    front_end: FrontEndName,
) -> None:
    """Cold reads of a lazy device, held against curl: all data are fetched over HTTP,
    and verified, each time.
    """
    with bed(run.parent, size_bytes=size_bytes, front_end=front_end) as place:
        for unit_bytes in _UNITS if "random" in kinds else ():
            run.add(
                *measure_random(
                    place, unit_bytes, runtime_s=runtime_s, turns=run.repeats
                )
            )
        for _ in run.turns():
            if "sequential" in kinds:
                run.add(measure_sequential(place))
            if "far" in kinds:
                with _delayed(round_trip_ms):
                    run.add(measure_far(place, runtime_s=runtime_s))


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.fetching")
