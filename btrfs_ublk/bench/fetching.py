"""How data arrive that are read for the first time, over HTTP on loopback: beside bare
requests, beside peers, far away, and with a cache whose disk is bad. And what reading
costs that the cache has, in time and in memory.

``python -m btrfs_ublk.bench.fetching --help``
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import random
import resource
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import click

from btrfs_ublk.base.capabilities import LOOP, ROOT, Fio, Program, require
from btrfs_ublk.base.entry import CountType, PathType, run_command
from btrfs_ublk.base.process import Argument
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.base.process import spawn
from btrfs_ublk.bench import options
from btrfs_ublk.bench.bed import (
    CURL,
    OPENSSL,
    PEERS,
    TIMEOUT_S,
    UNVERIFIED,
    Bed,
    Opened,
    bed,
)
from btrfs_ublk.bench.fio import parse_output, random_reads
from btrfs_ublk.bench.link import far_link
from btrfs_ublk.bench.origin import NGINX
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.stats import grouped
from btrfs_ublk.bench.study import LOAD, TURNS, Column, Run, ratio, study, table
from btrfs_ublk.content.digests import DEFAULT_UNIT_BYTES
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.page_cache import resident_bytes
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.units import BLOCK_BYTES, KIB, MIB, format_size

TC, CC = Program("tc", package="iproute2"), Program("cc", package="gcc")
_START = Path(__file__).with_name("start.json")
_FAILING = Path(__file__).parents[2] / "csrc/tests/fail-writes.c"
#: What each kind of measurement shows: its title, columns, measure, and note.
KINDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_READS, _CACHED_READ_COUNT = 400, 3000
#: Whether what a server has read of its cache stays in the page cache.
_HOW = {"kept": "", "dropped": "dropped", "chosen": "chosen"}
#: How many devices read it, whether in order, and what one before them has read.
_CACHED = {
    "cached": (1, True, False),
    "cached-again": (1, True, True),
    "cached-random": (1, False, False),
    "cached-shared": (4, False, False),
}
_SMALL = 4 * KIB
_UNITS = (_SMALL, 16 * KIB, 64 * KIB, DEFAULT_UNIT_BYTES)
GET, FRONT_END, OURS = "bare GET", "front end alone", "ours"
DEFAULT, ONE_EACH = "ours, as by default", "ours, a request per unit"
IN_SERVER = ", asked by the server"
DIRECT = ", past the page cache"
#: Of a server, in its environment: the most bytes of a request, who asks servers, and
#: how what the cache has is read.
_RUN_BYTES, _FETCH = "BTRFS_UBLK_RUN_BYTES", "BTRFS_UBLK_FETCH"
_CACHED_READS = "BTRFS_UBLK_CACHED_READS"

Open = Callable[[Bed], AbstractContextManager[Opened]]
Work = Callable[[Bed], Result]


@dataclass(frozen=True)
class Case:
    """One row of a kind: its name, and a turn of it."""

    subject: str
    work: Work
    unit: int = DEFAULT_UNIT_BYTES


def _first_reads(size_bytes: int, unit_bytes: int, seed: int) -> list[int]:
    """Return offsets of 4 KiB, at random and each in a unit of its own."""
    units = range(size_bytes // unit_bytes)
    chances = random.Random(seed)
    chosen = chances.sample(units, min(_READS, len(units)))
    inside = unit_bytes // BLOCK_BYTES
    return [x * unit_bytes + chances.randrange(inside) * BLOCK_BYTES for x in chosen]


def _fio(place: Bed, path: Path, offsets: Sequence[int], name: str) -> list[Argument]:
    """Return the argv of an fio that reads 4 KiB at each offset, one after the other,
    past the page cache; its results are in ``{name}.json``.
    """
    lines = [f"{path} read {offset} {BLOCK_BYTES}" for offset in offsets]
    ends = [f"{path} {action}" for action in ("add", "open", "close")]
    log = place.root / name
    log.write_text("\n".join(["fio version 2 iolog", *ends[:2], *lines, ends[2], ""]))
    words: list[Argument] = ["fio", "--name=reads", "--ioengine=psync", "--direct=1"]
    words += ["--thread", f"--read_iolog={log}", "--replay_no_stall=1"]
    return [*words, "--output-format=json+", f"--output={log}.json"]


def _read_at(place: Bed, path: Path, offsets: Sequence[int]) -> Result:
    run_program(_fio(place, path, offsets, "reads"), timeout_s=TIMEOUT_S)
    outcome = parse_output((place.root / "reads.json").read_text())
    return {"p50_us": outcome.latency_us["p50"], "iops": outcome.total_iops}


def _one_by_one(opened: Open, unit_bytes: int, warm: bool, place: Bed) -> Result:
    """Read where nothing was read before; if ``warm``, once more."""
    offsets = _first_reads(place.size_bytes, unit_bytes, time.monotonic_ns())
    with opened(place) as device:
        result = _read_at(place, device.path, offsets)
        if warm:
            _drop_caches()
            result = _read_at(place, device.path, offsets)
    return result


def _bare(unit_bytes: int, place: Bed) -> Result:
    took_us = place.get_us(unit_bytes, _READS)
    return {"p50_us": median(took_us), "iops": 1e6 * len(took_us) / sum(took_us)}


def _hash(unit_bytes: int, _: Bed) -> Result:
    unit = random.Random(3).randbytes(unit_bytes)
    took_ns = []
    for _turn in range(_READS):
        start_ns = time.perf_counter_ns()
        hashlib.sha256(unit).digest()
        took_ns.append(time.perf_counter_ns() - start_ns)
    return {"p50_us": median(took_ns) / 1e3}


def _drop_caches() -> None:
    """NB: caches are written before, as what is dirty stays in memory."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def _at_once(readers: int, runtime_s: float, place: Bed) -> Result:
    with place.ours(_SMALL) as device:
        outcome = random_reads(
            device.path,
            size_bytes=place.size_bytes,
            depth=readers,
            runtime_s=runtime_s,
            ramp_s=0.2,
            output=place.root / "fio.json",
        )
    return {"iops": outcome.total_iops, "p50_us": outcome.latency_us["p50"]}


def _timed(place: Bed, work: Callable[[], object], device: Opened | None) -> Result:
    """Return the time, CPU time of programs and servers, and requests that it took."""

    def cpu_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime + (device.cpu_s() if device else 0.0)

    before, began_s, start_s = place.requests(), cpu_s(), time.monotonic()
    work()
    seconds, used_s = time.monotonic() - start_s, cpu_s() - began_s
    requests = place.requests() - before
    return {"seconds": seconds, "cpu_s": used_s, "requests": requests}


def _dd(place: Bed, path: Path) -> list[Argument]:
    words = [f"if={path}", "of=/dev/null", "bs=1M", "status=none"]
    return ["dd", *words, f"count={place.size_bytes // MIB}"]


def _read_all(place: Bed, device: Opened, direct: bool = False) -> Result:
    argv = [*_dd(place, device.path), *(["iflag=direct"] if direct else [])]
    return _timed(place, lambda: run_program(argv, timeout_s=TIMEOUT_S), device)


def _at_the_same_time(programs: Sequence[Sequence[Argument]]) -> None:
    with ExitStack() as stack:
        for child in [stack.enter_context(spawn(argv)) for argv in programs]:
            if child.wait(TIMEOUT_S) != 0:
                raise BtrfsUblkError(child.failure("failed"))


def _cached(how: str, devices: int, in_order: bool, again: bool, place: Bed) -> Result:
    """Have devices that share a full cache read at the same time: all in order, or the
    same blocks, each in an order of its own; ``again`` after a device that has read
    all and is gone. ``memory_bytes`` is what the page cache
    has of the cache's file then, and ``refetched`` counts units that were fetched anew.
    """
    chances = random.Random(time.monotonic_ns())
    blocks = chances.sample(range(place.size_bytes // BLOCK_BYTES), _CACHED_READ_COUNT)

    def program(index: int, path: Path) -> Sequence[Argument]:
        if in_order:
            return _dd(place, path)
        mine = chances.sample(blocks, len(blocks))
        offsets = [block * BLOCK_BYTES for block in mine]
        return _fio(place, path, offsets, f"reads-{index}")

    def fetched() -> int:
        found = [each.server.stats() for each in opened if each.server]
        return sum(each.lazy[0].fetcher.units_fetched for each in found)

    with ExitStack() as stack:
        cache = stack.enter_context(place.new_cache())
        with place.ours(cache=cache) as device:
            assert device.server is not None
            device.server.map().drain()
        _drop_caches()
        ours = partial(_with, _CACHED_READS, how, lambda _: place.ours(cache=cache))
        if again:
            with ours(place) as device:
                _read_all(place, device)
        opened = [stack.enter_context(ours(place)) for _ in range(devices)]
        programs = [program(*each) for each in enumerate(x.path for x in opened)]
        pids = [pid for each in opened for pid in each.pids]
        servers = Opened(opened[0].path, pids)
        result = _timed(place, lambda: _at_the_same_time(programs), servers)
        (data,) = cache.glob("*.data")
        return result | {"memory_bytes": resident_bytes(data), "refetched": fetched()}


def _sequential(opened: Open, place: Bed, *, direct: bool = False) -> Result:
    with opened(place) as device:
        return _read_all(place, device, direct)


def _curl(then: str, place: Bed) -> Result:
    return _timed(place, lambda: place.fetch(then), None)


def _keep(place: Bed) -> Result:
    """Fetch, hash, and leave all in memory, as the page cache does: in a new file."""
    path = place.root / "kept"
    try:
        return _curl(f"| tee {path} | openssl dgst -sha256", place)
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _with(name: str, value: str, opened: Open, place: Bed) -> Iterator[Opened]:
    """Have a server find this in its environment."""
    os.environ[name] = value
    try:
        with opened(place) as device:
            yield device
    finally:
        os.environ.pop(name, None)


_one_each = partial(_with, _RUN_BYTES, "1")
_in_server = partial(_with, _FETCH, "in-process")


def _start(opened: Open, place: Bed) -> Result:
    """Read what a root file system's start reads first: 4 KiB at a time by read(2) and
    through mmap(2) by turns, with the kernel's usual read-ahead.
    """
    runs = json.loads(_START.read_text())["runs"]
    blocks = place.size_bytes // BLOCK_BYTES

    def read(path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            with mmap.mmap(file.fileno(), place.size_bytes, prot=mmap.PROT_READ) as at:
                for index, (first, count) in enumerate(runs):
                    for block in range(first, first + count):
                        offset = block % blocks * BLOCK_BYTES
                        if index % 2:
                            assert at[offset] is not None
                        else:
                            os.pread(file.fileno(), BLOCK_BYTES, offset)

    with opened(place) as device:
        return _timed(place, lambda: read(device.path), device)


@contextmanager
def _failing(place: Bed, cache: Path, **how: str) -> Iterator[None]:
    """Let writes and syncs of the cache's files fail, by a preloaded library."""
    require(CC)
    library = place.root / "fail-writes.so"
    words = ["cc", "-shared", "-fPIC", "-D_GNU_SOURCE", "-ldl"]
    run_program([*words, "-o", library, _FAILING], timeout_s=TIMEOUT_S)
    given = {"LD_PRELOAD": str(library), "FAIL_UNDER": str(cache)} | how
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _bad(how: str, place: Bed) -> Result:
    """Read all with a cache that is so; errors are those that readers met."""
    with ExitStack() as stack:
        cache = None
        with ExitStack() as started:
            if how != _NO_CACHE:
                cache = stack.enter_context(place.new_cache())
            if cache and how == _LOCKED:
                stack.enter_context(_locked(cache))
            elif cache and _BAD[how]:
                started.enter_context(_failing(place, cache, **_BAD[how]))
            device = stack.enter_context(place.ours(cache=cache))
        result = _read_all(place, device)
        assert device.server is not None
        (lazy,) = device.server.stats().lazy
        stored = lazy.fetcher.units_stored / (place.size_bytes // DEFAULT_UNIT_BYTES)
        return result | {"errors": lazy.fetcher.read_errors, "stored": stored}


def _always(number: int) -> dict[str, str]:
    every = {"FAIL_FROM": "1", "FAIL_COUNT": "1000000000"}
    return {**every, "FAIL_ERRNO": str(number)}


_NO_CACHE, _LOCKED = "no cache", "locked by another"
#: What is wrong with the cache's disk, as csrc/tests/fail-writes.c takes it.
_BAD: dict[str, dict[str, str]] = {
    _NO_CACHE: {},
    "healthy": {},
    "60 s per sync": {"SYNC_MS": "60000"},
    "full": _always(errno.ENOSPC),
    "read-only": _always(errno.EROFS),
    "EIO": _always(errno.EIO),
    _LOCKED: {},
}


def cases(name: str, runtime_s: float) -> list[Case]:
    """Return the rows of a kind."""

    def cold(opened: Open, unit: int = DEFAULT_UNIT_BYTES) -> Work:
        return partial(_one_by_one, opened, unit, False)

    def warm(opened: Open) -> Work:
        return partial(_one_by_one, opened, DEFAULT_UNIT_BYTES, True)

    def whole(opened: Open) -> Work:
        return partial(_sequential, opened)

    def peers(work: Callable[[Open], Work]) -> list[Case]:
        opens: dict[str, Open] = {"nbdkit": Bed.nbdkit, "rclone": Bed.rclone}
        return [Case(each + UNVERIFIED, work(opens[each])) for each in PEERS]

    def ours(unit: int) -> Open:
        return lambda place: place.ours(unit)

    def started(unit: int) -> Open:
        return lambda place: place.with_cache(unit)

    def pinned(place: Bed) -> AbstractContextManager[Opened]:
        return place.with_cache(pins=True)

    if name == "random":
        return [
            *(Case(GET, partial(_bare, unit), unit) for unit in _UNITS),
            *(Case("SHA-256", partial(_hash, unit), unit) for unit in _UNITS),
            Case(FRONT_END, cold(Bed.alone, _SMALL), _SMALL),
            *(Case(OURS, cold(ours(unit), unit), unit) for unit in _UNITS),
            Case(DEFAULT, cold(Bed.with_cache)),
            Case(f"{DEFAULT}, pins", cold(pinned)),
            *peers(cold),
        ]
    if name == "warm":
        return [
            Case(DEFAULT, warm(Bed.with_cache)),
            Case(FRONT_END, warm(Bed.alone)),
            *peers(warm),
        ]
    if name == "sequential":
        return [
            Case("curl | openssl dgst", partial(_curl, "| openssl dgst -sha256")),
            Case("curl", partial(_curl, "-o /dev/null")),
            Case("curl | tee | openssl dgst", _keep),
            Case(OURS, whole(Bed.ours)),
            Case(OURS + DIRECT, partial(_sequential, Bed.ours, direct=True)),
            Case(OURS + IN_SERVER, whole(partial(_in_server, Bed.ours))),
            Case(ONE_EACH, whole(partial(_one_each, Bed.ours))),
            *peers(whole),
        ]
    if name == "start":
        return [
            Case(subject, partial(_start, opened), unit)
            for unit in (64 * KIB, DEFAULT_UNIT_BYTES, MIB)
            for subject, opened in (
                (f"units of {format_size(unit)}", started(unit)),
                (ONE_EACH, partial(_one_each, started(unit))),
            )
        ]
    if name == "process":
        return [
            Case(subject, cold(how(opened), unit), unit)
            for unit, opened in (
                (_SMALL, ours(_SMALL)),
                (DEFAULT_UNIT_BYTES, Bed.with_cache),
            )
            for subject, how in (
                (OURS, lambda x: x),
                (OURS + IN_SERVER, lambda x: partial(_in_server, x)),
            )
        ]
    if name in _CACHED:
        return [
            Case(x, partial(_cached, how, *_CACHED[name])) for x, how in _HOW.items()
        ]
    if name == "bad-cache":
        return [Case(each, partial(_bad, each)) for each in _BAD]
    return [
        Case(f"{each} at once", partial(_at_once, each, runtime_s), _SMALL)
        for each in ((1, 64) if name == "far" else (1, 8, 64, 96))
    ]


def tables(document: Document) -> list[Table]:
    """Make a table for each kind of measurement that was made."""
    given = document["parameters"]
    size_bytes = given["size_bytes"]

    def mib_per_s(turns: Sequence[Result]) -> float:
        return float(size_bytes / MIB / median(x["seconds"] for x in turns))

    columns = {
        "p50_us": Column("p50, us", "p50_us", 1),
        "iops": Column("reads/s", "iops"),
        "mib_per_s": Column("MiB/s", mib_per_s),
        "seconds": Column("s", "seconds", 2),
        "cpu_s": Column("CPU, s", "cpu_s", 2),
        "requests": Column("requests", "requests"),
        "errors": Column("errors", "errors"),
        "stored": Column("stored", "stored", 2),
        "memory": Column("memory, MiB", "memory_bytes", 1, 1 / MIB),
        "refetched": Column("fetched again", "refetched"),
    }
    rate = f", {given['mbit']} Mbit/s" if given["mbit"] else ""
    by = ", by a proxy" if given.get("link") == "proxy" else ""
    distance = f"{given['round_trip_ms']} ms of round trip{rate}{by}."
    names = {
        "": lambda x: str(x["subject"]),
        "unit": lambda x: format_size(x["unit"]),
    }
    found = []
    for name, results in grouped(document["results"], lambda x: x["what"]).items():
        kind = KINDS[name]
        order = [(each.subject, each.unit) for each in cases(name, 0.0)]
        results.sort(key=lambda x: order.index((x["subject"], x["unit"])))
        shown = [columns[each] for each in kind["columns"]]
        note = kind["note"].format(size=format_size(size_bytes), distance=distance)
        found.append(
            table(
                kind["title"],
                results,
                names,
                [TURNS, *shown, ratio(results, kind["against"], kind["measure"]), LOAD],
                note=note,
            )
        )
    return found


@contextmanager
def _distant(place: Bed, link: str, round_trip_ms: int, mbit: int) -> Iterator[Bed]:
    """Have the server far away: delay all of loopback, by half of the round trip each
    way, and limit its rate; or only what passes a proxy.
    """
    if link == "proxy":
        port = place.origin[1]
        with far_link(port, round_trip_ms=round_trip_ms, mbit=mbit) as origin:
            yield replace(place, origin=origin)
        return
    netem = ["dev", "lo", "root", "netem"]
    limits = [*netem, "limit", "100000", "delay", f"{round_trip_ms / 2:g}ms"]
    limits += ["rate", f"{mbit}mbit"] if mbit else []
    require(TC)
    run_program(["tc", "qdisc", "add", *limits], timeout_s=TIMEOUT_S)
    try:
        yield place
    finally:
        run_program(["tc", "qdisc", "del", *netem], timeout_s=TIMEOUT_S)


def _can_run(case: Case) -> bool:
    name = case.subject.removesuffix(UNVERIFIED)
    for capability in PEERS.get(name, ()):
        reason = capability.probe()
        if reason:
            options.progress(f"{name} is left out: {capability.name}: {reason}")
            return False
    return True


@study(
    "fetching",
    click.option(
        *("--what", "chosen"),
        type=click.Choice(sorted(KINDS)),
        multiple=True,
        default=("sequential", "random"),
    ),
    options.size_option("256M", "Of the object."),
    options.runtime_option(2.0),
    click.option(
        *("--round-trip", "round_trip_ms"),
        type=CountType(1, 1000),
        default=20,
        help="Of far and start, in ms, by netem(8): in a VM, or a network namespace of "
        "its own (unshare --net; ip link set lo up).",
    ),
    click.option(
        "--mbit",
        type=CountType(0),
        default=0,
        help="The rate then; 0: not limited.",
    ),
    click.option(
        "--link",
        type=click.Choice(["netem", "proxy"]),
        default="netem",
        help="What delays: netem, or where the kernel has none, a proxy before the web "
        "server, without slow start.",
    ),
    click.option(
        "--disk",
        type=PathType(file_okay=False, exists=True),
        default="/var/tmp",
        help="Where caches are.",
    ),
    options.front_end_option,
    needs=(ROOT, LOOP, NGINX, CURL, OPENSSL, Fio("psync"), Fio("io_uring")),
    repeats=5,
    in_memory=True,
    recorded=("size_bytes", "runtime_s", "round_trip_ms", "mbit", "link"),
)
def command(
    run: Run,
    chosen: Sequence[str],
    size_bytes: int,
    runtime_s: float,
    round_trip_ms: int,
    mbit: int,
    link: str,
    disk: Path,
    front_end: FrontEndName,
) -> None:
    """Read a lazy device whose data are fetched over HTTP and verified each time, and
    what else a user could have, by turns, in an order that is drawn anew for each.
    """
    chances = random.Random(1)
    with bed(run.parent, disk, size_bytes=size_bytes, front_end=front_end) as place:
        plan = [
            (name, case)
            for name in chosen
            for case in cases(name, runtime_s)
            if _can_run(case)
        ]
        for turn in run.turns(tell=True):
            for name, case in chances.sample(plan, len(plan)):
                about = {"what": name, "subject": case.subject, "unit": case.unit}
                about |= {"turn": turn, "load": os.getloadavg()[0]}
                with ExitStack() as stack:
                    at = place
                    if KINDS[name].get("far"):
                        far = _distant(place, link, round_trip_ms, mbit)
                        at = stack.enter_context(far)
                    run.add(about | case.work(at))


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.fetching")
