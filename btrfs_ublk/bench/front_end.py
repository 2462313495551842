"""Random reads through a front end, against btrfs on a loop device on a file.

``python -m btrfs_ublk.bench.front_end --help``
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import wait_until_quiet, watched
from btrfs_ublk.bench.report import (
    Document,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.bench.sprouts import plain_btrfs
from btrfs_ublk.bench.stats import grouped, median_of
from btrfs_ublk.capabilities import BTRFS, LOOP, MKFS_BTRFS, ROOT, Program, require
from btrfs_ublk.entry import run_command
from btrfs_ublk.process import run, spawn
from btrfs_ublk.resources.loop import loop_device
from btrfs_ublk.resources.tempdir import tempdir
from btrfs_ublk.server import BlockServer, FrontEndName, MemsetSegment
from btrfs_ublk.server.description import Description
from btrfs_ublk.units import MIB
from btrfs_ublk.volume import volume

FIO = Program("fio", "fio")

#: What fio is told; all read 4 KiB at random with O_DIRECT.
WORKLOADS: dict[str, Sequence[str]] = {
    "psync": ("--ioengine=psync",),
    "io_uring d64": ("--ioengine=io_uring", "--iodepth=64"),
}
#: Held against which the others are: the first of its layer.
BASELINES = {"device": "device: loop on a file", "file": "file: btrfs on loop"}
#: How a hog runs.
HOGS: dict[str, Sequence[str]] = {"idle": ("chrt", "--idle", "0"), "normal": ()}
#: A session of its own, as whatever else runs on a machine has: with autogroups
#: (sched(7)) the scheduler treats it as one task. It ends with the one who waits.
_IN_A_SESSION = ("setsid", "--fork", "--wait", "setpriv", "--pdeathsig", "KILL")
_HOG = ("sh", "-c", "while :; do :; done")
_BYTE = 97
_TIMEOUT_S = 120.0


@contextmanager
def subjects(
    front_ends: Sequence[FrontEndName],
    *,
    parent: Path,
    size_bytes: int,
    queues: int | None,
    depth: int | None,
    realtime: bool,
) -> Iterator[dict[str, Path]]:
    """What is read, by name: devices, and files of as many bytes on btrfs."""
    memset = MemsetSegment(offset=0, length=size_bytes, byte=_BYTE)
    with ExitStack() as stack:
        directory = stack.enter_context(tempdir(parent=parent))
        found: dict[str, Path] = {}
        plain = directory / "plain.img"
        _write(plain, size_bytes)
        loop = stack.enter_context(loop_device(plain, read_only=True))
        found[BASELINES["device"]] = loop.path
        mount = stack.enter_context(plain_btrfs(directory, nodatacow=True))
        found[BASELINES["file"]] = mount.target / "file"
        _write(mount.target / "file", size_bytes)
        for name in front_ends:
            server = BlockServer(
                Description(size_bytes, [memset]),
                front_end=name,
                queues=queues,
                depth=depth,
                realtime=realtime,
            )
            found[f"device: {name}"] = stack.enter_context(server).device
            target = directory / name
            target.mkdir()
            made = stack.enter_context(
                volume(
                    target,
                    [memset],
                    virtual_data_size=size_bytes,
                    parent=directory,
                    front_end=name,
                    queues=queues,
                    depth=depth,
                    realtime=realtime,
                )
            )
            clone = made.clone("clone", offset=0, size_bytes=size_bytes)
            found[f"file: clone on {name}"] = clone
        run(["sync"], timeout_s=_TIMEOUT_S)
        yield found


def _write(path: Path, size_bytes: int) -> None:
    piece = bytes([_BYTE]) * MIB
    with path.open("xb") as file:
        for _ in range(size_bytes // MIB):
            file.write(piece)


@contextmanager
def hogs(kind: str | None) -> Iterator[None]:
    """One process for each CPU that does nothing but use it: with the scheduling policy
    SCHED_IDLE, or like all others. None: no such.
    """
    with ExitStack() as stack:
        for _ in os.sched_getaffinity(0) if kind else ():
            stack.enter_context(spawn([*_IN_A_SESSION, *HOGS[kind or ""], *_HOG]))
        yield


def measure(
    path: Path,
    *,
    workload: str,
    runtime_s: float,
    size_bytes: int,
    hog: str | None = None,
) -> Result:
    """I/O per second, and what all of the machine spent on each, while fio runs. The
    latter only without hogs: they take all that is left.
    """
    argv = [
        *("fio", "--name=read", f"--filename={path}", "--readonly", "--direct=1"),
        *("--rw=randread", "--bs=4k", f"--size={size_bytes}", "--time_based"),
        *(f"--runtime={runtime_s:g}", "--ramp_time=0.3", "--output-format=json"),
        *("--randrepeat=1", *WORKLOADS[workload]),
    ]
    with hogs(hog), watched() as busy:
        output = run(argv, timeout_s=_TIMEOUT_S + runtime_s).stdout
    read: dict[str, Any] = json.loads(output)["jobs"][0]["read"]
    return {
        "iops": read["iops"],
        "p99_us": read["clat_ns"]["percentile"]["99.000000"] / 1e3,
        "load": busy["load"],
        # NB: JSON has no NaN.
        **({} if hog else {"cpu_us": busy["busy_cores"] * 1e6 / read["iops"]}),
    }


def ratios(results: Sequence[Result], baseline: Sequence[Result]) -> list[float]:
    """Turn by turn, as the machine may be busier in one than in another."""
    before = {result["turn"]: result["iops"] for result in baseline}
    return [
        result["iops"] / before[result["turn"]]
        for result in results
        if result["turn"] in before
    ]


def tables(document: Document) -> list[Table]:
    """One table for each workload: medians of the turns."""
    made = []
    for workload, results in grouped(
        document["results"], lambda result: result["workload"]
    ).items():
        by_subject = grouped(results, lambda result: result["subject"])
        rows = []
        for subject, turns in by_subject.items():
            has_cpu = all("cpu_us" in turn for turn in turns)
            baseline = by_subject.get(BASELINES[subject.partition(":")[0]], [])
            compared = ratios(turns, baseline)
            rows.append(
                (
                    subject,
                    str(len(turns)),
                    number(median_of(turns, "iops")),
                    number(median(compared) if compared else float("nan"), 2),
                    number(median_of(turns, "p99_us"), 0),
                    number(median_of(turns, "cpu_us"), 1) if has_cpu else "-",
                    number(median_of(turns, "load"), 1),
                )
            )
        made.append(
            Table(
                f"4 KiB random reads, {workload}, 1 job",
                ("read", "turns", "IOPS", "ratio", "p99 us", "CPU us", "load"),
                rows,
                note="Medians. Ratio: to the same layer's loop device on a file, turn "
                "by turn. CPU: of the whole machine, per read.",
            )
        )
    return made


@click.command(context_settings=options.SETTINGS)
@click.option(
    "--front-end",
    "front_ends",
    multiple=True,
    type=click.Choice(["fuse", "ublk"]),
    default=("fuse",),
    help="May be given twice.",
)
@click.option(
    "--size",
    "size_bytes",
    default="512M",
    callback=options.parse_sizes,
    help="Of each device and file.",
)
@click.option("--runtime", "runtime_s", default=3.0, help="Seconds of each turn.")
@click.option("--queues", type=options.COUNT, help="Threads of the server.")
@click.option("--depth", type=options.COUNT, help="Requests in flight of each.")
@click.option("--realtime", is_flag=True, help="Servers run before all else.")
@click.option(
    "--hog",
    type=click.Choice(list(HOGS)),
    help="Meanwhile a busy process on each CPU, of low or usual priority.",
)
@options.common_options(repeats=5)
def command(
    front_ends: Sequence[FrontEndName],
    size_bytes: int,
    runtime_s: float,
    queues: int | None,
    depth: int | None,
    realtime: bool,
    hog: str | None,
    repeats: int,
    parent: Path,
    patience_s: float,
    as_json: bool,
) -> None:
    """Read a memset device, and a clone of it on a sprout, through front ends; and for
    comparison a loop device on a file, and a file of btrfs on such a one.
    """
    require(ROOT, BTRFS, LOOP, MKFS_BTRFS, FIO)
    parameters = {
        "size_bytes": size_bytes,
        "runtime_s": runtime_s,
        "queues": queues,
        "depth": depth,
        "realtime": realtime,
        "hog": hog,
    }
    document = make_document(
        "front_end", parameters=parameters, directory=parent, results=[]
    )
    with subjects(
        front_ends,
        parent=parent,
        size_bytes=size_bytes,
        queues=queues,
        depth=depth,
        realtime=realtime,
    ) as found:
        for turn in range(1, repeats + 1):
            for workload in WORKLOADS:
                for subject, path in found.items():
                    wait_until_quiet(timeout_s=patience_s)
                    result = measure(
                        path,
                        workload=workload,
                        runtime_s=runtime_s,
                        size_bytes=size_bytes,
                        hog=hog,
                    )
                    document["results"].append(
                        {"workload": workload, "subject": subject, "turn": turn}
                        | result
                    )
            options.progress(f"turn {turn} of {repeats}")
    finish(document, as_json=as_json)


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.front_end")
