"""How data arrive that are read for the first time, over HTTP on loopback, beside bare
requests; and far away.

``python -m btrfs_ublk.bench.fetching --help``
"""

import os
import random
import resource
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import click

from btrfs_ublk.base.capabilities import LOOP, ROOT, Fio, Program, require
from btrfs_ublk.base.entry import CountType, PathType, run_command
from btrfs_ublk.base.process import Argument
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.bench import options
from btrfs_ublk.bench.bed import CURL, OPENSSL, TIMEOUT_S, Bed, Opened, bed
from btrfs_ublk.bench.fio import parse_output, random_reads
from btrfs_ublk.bench.origin import NGINX
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.stats import grouped
from btrfs_ublk.bench.study import LOAD, TURNS, Column, Run, ratio, study, table
from btrfs_ublk.content.digests import DEFAULT_UNIT_BYTES
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.units import BLOCK_BYTES, KIB, MIB, format_size

TC = Program("tc", package="iproute2")
#: What each kind of measurement shows: its title, columns, measure, and note.
KINDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_READS = 400
_SMALL = 4 * KIB
_UNITS = (_SMALL, 16 * KIB, 64 * KIB, DEFAULT_UNIT_BYTES)
GET, FRONT_END, OURS = "bare GET", "front end alone", "ours"
DEFAULT = "ours, as by default"
DIRECT = ", past the page cache"

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


def _read_at(place: Bed, path: Path, offsets: Sequence[int]) -> Result:
    """Have fio read 4 KiB at each offset, one after the other, past the page cache."""
    lines = [f"{path} read {offset} {BLOCK_BYTES}" for offset in offsets]
    ends = [f"{path} {action}" for action in ("add", "open", "close")]
    log, output = place.root / "reads", place.root / "reads.json"
    log.write_text("\n".join(["fio version 2 iolog", *ends[:2], *lines, ends[2], ""]))
    words: list[Argument] = ["fio", "--name=reads", "--ioengine=psync", "--direct=1"]
    words += ["--thread", f"--read_iolog={log}", "--replay_no_stall=1"]
    words += ["--output-format=json+", f"--output={output}"]
    run_program(words, timeout_s=TIMEOUT_S)
    outcome = parse_output(output.read_text())
    return {"p50_us": outcome.latency_us["p50"], "iops": outcome.total_iops}


def _one_by_one(opened: Open, unit_bytes: int, warm: bool, place: Bed) -> Result:
    """Read where nothing was read before; if ``warm``, once more."""
    offsets = _first_reads(place.size_bytes, unit_bytes, time.monotonic_ns())
    with opened(place) as device:
        before, result = device.waits(), _read_at(place, device.path, offsets)
        if warm:
            _drop_caches()
            before, result = device.waits(), _read_at(place, device.path, offsets)
        return result | {"waits": (device.waits() - before) / len(offsets)}


def _bare(unit_bytes: int, place: Bed) -> Result:
    took_us = place.get_us(unit_bytes, _READS)
    return {"p50_us": median(took_us), "iops": 1e6 * len(took_us) / sum(took_us)}


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


def _read_all(place: Bed, device: Opened, direct: bool = False) -> None:
    argv: list[Argument] = ["dd", f"if={device.path}", "of=/dev/null", "bs=1M"]
    argv += [f"count={place.size_bytes // MIB}", "status=none"]
    run_program([*argv, *(["iflag=direct"] if direct else [])], timeout_s=TIMEOUT_S)


def _sequential(direct: bool, place: Bed) -> Result:
    if not direct:
        # A virtual machine's host takes 10 to 45 us for a page that was not used
        # lately: have it give those that the page cache takes next.
        with place.alone() as device:
            _read_all(place, device)
    with place.ours() as device:
        return _timed(place, lambda: _read_all(place, device, direct), device)


def _curl(place: Bed) -> Result:
    return _timed(place, place.fetch, None)


def cases(name: str, runtime_s: float) -> list[Case]:
    """Return the rows of a kind."""

    def cold(opened: Open, unit: int = DEFAULT_UNIT_BYTES) -> Work:
        return partial(_one_by_one, opened, unit, False)

    def ours(unit: int) -> Open:
        return lambda place: place.ours(unit)

    if name == "random":
        return [
            *(Case(GET, partial(_bare, unit), unit) for unit in _UNITS),
            Case(FRONT_END, cold(Bed.alone, _SMALL), _SMALL),
            *(Case(OURS, cold(ours(unit), unit), unit) for unit in _UNITS),
            Case(DEFAULT, cold(Bed.with_cache)),
        ]
    if name == "warm":
        opens = {DEFAULT: Bed.with_cache, FRONT_END: Bed.alone}
        return [
            Case(each, partial(_one_by_one, opened, DEFAULT_UNIT_BYTES, True))
            for each, opened in opens.items()
        ]
    if name == "sequential":
        return [
            Case("curl | openssl dgst", _curl),
            Case(OURS, partial(_sequential, False)),
            Case(OURS + DIRECT, partial(_sequential, True)),
        ]
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

    def waits(turns: Sequence[Result]) -> str:
        found = [x["waits"] for x in turns if "waits" in x]
        return f"{median(found):.1f}" if found else ""

    columns = {
        "p50_us": Column("p50, us", "p50_us", 1),
        "iops": Column("reads/s", "iops"),
        "waits": Column("waits", waits),
        "mib_per_s": Column("MiB/s", mib_per_s),
        "seconds": Column("s", "seconds", 2),
        "cpu_s": Column("CPU, s", "cpu_s", 2),
        "requests": Column("requests", "requests"),
    }
    rate = f", {given['mbit']} Mbit/s" if given["mbit"] else ""
    distance = f"{given['round_trip_ms']} ms of round trip{rate}."
    names = {"": lambda x: str(x["subject"]), "unit": lambda x: format_size(x["unit"])}
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
def _distant(round_trip_ms: int, mbit: int) -> Iterator[None]:
    """Have the server far away: delay all of loopback, by half of the round trip each
    way, and limit its rate.
    """
    netem = ["dev", "lo", "root", "netem"]
    limits = [*netem, "limit", "100000", "delay", f"{round_trip_ms / 2:g}ms"]
    limits += ["rate", f"{mbit}mbit"] if mbit else []
    require(TC)
    run_program(["tc", "qdisc", "add", *limits], timeout_s=TIMEOUT_S)
    try:
        yield
    finally:
        run_program(["tc", "qdisc", "del", *netem], timeout_s=TIMEOUT_S)


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
        help="Of far, in ms, by netem(8): in a VM, or a network namespace of "
        "its own (unshare --net; ip link set lo up).",
    ),
    click.option(
        "--mbit", type=CountType(0), default=0, help="The rate then; 0: not limited."
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
    recorded=("size_bytes", "runtime_s", "round_trip_ms", "mbit"),
)
def command(
    run: Run,
    chosen: Sequence[str],
    size_bytes: int,
    runtime_s: float,
    round_trip_ms: int,
    mbit: int,
    disk: Path,
    front_end: FrontEndName,
) -> None:
    """Read a lazy device whose data are fetched over HTTP and verified each time, and
    programs that only fetch, by turns, in an order that is drawn anew for each.
    """
    with bed(run.parent, disk, size_bytes=size_bytes, front_end=front_end) as place:
        plan = [(name, case) for name in chosen for case in cases(name, runtime_s)]
        for name, case in run.drawn(plan):
            far = KINDS[name].get("far")
            with _distant(round_trip_ms, mbit) if far else nullcontext():
                result = case.work(place)
            about = {"what": name, "subject": case.subject, "unit": case.unit}
            run.add(about | result)


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.fetching")
