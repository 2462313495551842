"""Measures containerd with our snapshotter against its own overlayfs.

``python tests/campaigns/container_speed.py calls --help``: calls of the snapshots API.
``starts``: from an image that was never here to the end of what an application does
first. All have disks of their own, and take turns. Run it by ``scripts/isolate``, as
mounts that others copy keep disks busy.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from signal import SIGINT
from typing import Any

import click
import grpc
from campaign import apart, limit_option
from container_bed import (
    NEEDS,
    OVERLAYFS,
    bed,
    bystanders,
    cpu_s,
    far,
    pod,
    run_until_end,
    running,
)
from container_images import APPLICATIONS, KEPT, SKOPEO, Made, make_images
from support.containers import CONTAINERD, NAME, TIMEOUT_S, Cri
from support.processes import ending_with_us, stop
from support.snapshotter import Client

from btrfs_ublk.base.entry import PathType, run_command
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.bench.options import progress
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.stats import bootstrap_interval, grouped, median_of, quantile
from btrfs_ublk.bench.study import LOAD, TURNS, Column, Run, study, table
from btrfs_ublk.content import Trace
from btrfs_ublk.device import show_device, supervised_device
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.server import Description, PatternSegment
from btrfs_ublk.testing.registry import REGISTRY, loopback_registry
from btrfs_ublk.units import MIB
from btrfs_ublk.volume.store import volume_directories

_NAMESPACE = (("containerd-namespace", "default"),)
CALLERS = (OVERLAYFS, NAME)
CALLS = ("Prepare", "Mounts", "Stat", "Commit", "Remove")
_LAYERS = 3
_RESTART_S = 0.1  # RestartSec= of its unit
_SETTLED_S = 1.5
_SCRIPT = "tests/campaigns/container_speed.py"
#: It keeps the daemon alive, as it is on hosts with systemd.
_IDLE = "container-speed-idle"
#: containerd collects what nothing else refers to.
_KEPT = {"containerd.io/gc.root": "now"}


def p99(key: str, scale: float = 1.0, digits: int = 2) -> Column:
    def of(results: Sequence[Result]) -> float:
        return quantile(sorted(each[key] for each in results), 0.99)

    return Column("P99", of, digits, scale)


class _Caller:
    """Makes the calls, and notes how long they take."""

    def __init__(self, subject: str, channel: grpc.Channel) -> None:
        self._client = Client(channel, snapshotter=subject, metadata=_NAMESPACE)
        self._subject = subject
        self._numbers = count()
        self.parent = ""

    def round(self, *, keep: bool = False) -> Result:
        """Make a layer upon ``parent``; with ``keep``, it is the next one's parent.
        The result has the seconds that each call took."""
        result: Result = {"subject": self._subject}
        number = next(self._numbers)
        key, name = f"{self._subject} {number}", f"{self._subject} layer {number}"
        asked: dict[str, dict[str, Any]] = {
            "Prepare": {"key": key, "parent": self.parent, "labels": _KEPT},
            "Mounts": {"key": key},
            "Stat": {"key": key},
            "Commit": {"name": name, "key": key, "labels": _KEPT},
            "Remove": {"key": name},
        }
        for call in CALLS[:-1] if keep else CALLS:
            began_s = time.monotonic()
            self._client.call(call, **asked[call])
            result[call] = time.monotonic() - began_s
        if keep:
            self.parent = name
        return result


def _call_tables(document: Document) -> list[Table]:
    results = [
        {"subject": each["subject"], "call": call, "seconds": each[call]}
        for each in document["results"]
        for call in CALLS
    ]
    by = grouped(results, lambda x: (x["subject"], x["call"]))

    def against(mine: Sequence[Result]) -> float:
        other = by[OVERLAYFS, mine[0]["call"]]
        half = [sorted(x["seconds"] for x in some) for some in (mine, other)]
        return quantile(half[0], 0.5) / quantile(half[1], 0.5)

    results = sorted(
        results,
        key=lambda x: (CALLS.index(x["call"]), CALLERS.index(x["subject"])),
    )
    columns = [
        Column("calls", len),
        Column("median", "seconds", 2, 1e3),
        p99("seconds", 1e3),
        Column("times that of overlayfs", against, 2),
    ]
    names = {"": lambda x: str(x["call"]), " ": lambda x: str(x["subject"])}
    return [table("Calls of the snapshots API, ms", results, names, columns, left=2)]


@study(
    "containers-calls",
    needs=NEEDS,
    repeats=200,
    in_memory=True,
    tables=_call_tables,
)
def calls(run: Run) -> None:
    """Make a layer upon three others, ask for it, commit and remove it."""
    chances = _begin(run)
    with bed(run.parent) as host, running(host):
        with grpc.insecure_channel(f"unix:{host.work}/containerd.sock") as channel:
            callers = [_Caller(subject, channel) for subject in CALLERS]
            for caller in callers:
                for _ in range(_LAYERS):
                    caller.round(keep=True)
            for _ in run.turns():
                for caller in chances.sample(callers, len(callers)):
                    run.add(caller.round())


def _begin(run: Run) -> random.Random:
    """Say in the document what runs, and return where chances come from."""
    run.document["script"] = _SCRIPT
    said = run_program([CONTAINERD.name, "--version"], timeout_s=TIMEOUT_S).stdout
    run.document["containerd"] = said.split()[2]
    return random.Random(1)


_latency_option = click.option(
    "--latency", "latency_ms", type=float, default=20.0, help="Of a request, in ms."
)
_mbit_option = click.option(
    "--mbit", type=click.IntRange(min=1), default=100, help="The rate of the registry."
)
_keep_option = click.option(
    "--keep",
    type=PathType(file_okay=False),
    default=KEPT,
    help="Where the images and their registry stay for the next run.",
)


@dataclass(frozen=True)
class Subject:
    snapshotter: str
    tag: str = "plain"
    options: Sequence[str] = ()


SUBJECTS = {
    OVERLAYFS: Subject(OVERLAYFS),
    "sealed": Subject(NAME),
    "sealed, traced": Subject(NAME, "traced"),
    "sealed, traced, completed": Subject(NAME, "traced", ["--complete=1G/s"]),
}


_ALL = " && find / -xdev -type f -exec cat {} + > /dev/null"


@contextmanager
def recording(volume: str, path: Path) -> Iterator[None]:
    """Write what is read of a volume's image inside the block to a trace."""
    argv = [sys.executable, "-m", "btrfs_ublk.cli.main", "trace", "record", volume]
    argv += ["--output", str(path)]
    process = subprocess.Popen(ending_with_us(argv), stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None and process.stderr.readline()
        yield
        process.send_signal(SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    finally:
        stop(process)


class _Applications:
    """What all turns share: a registry with all images, and where it is; a link to it,
    and the process ID of the daemon."""

    def __init__(
        self, parent: Path, work: Path, registry: str, link: tuple[float, float]
    ) -> None:
        self.parent, self._work, self.registry = parent, work, registry
        self.link = link
        daemon = show_device(_IDLE).state.supervisor
        assert daemon
        self.daemon = daemon.pid

    def make(self, name: str) -> Made:
        def record(image: str) -> Trace:
            path = self._work / f"{name}.trace"
            with bed(self.parent) as host:
                host.options = ["--insecure", "--writable=4G"]
                with pod(host, NAME, self.registry) as (cri, identifier):
                    cri.pull(image)
                    (volume,) = volume_directories()
                    with recording(volume.name, path):
                        self._start(cri, identifier, image, name)
            return Trace.load(path)

        return make_images(name, self._work, self.registry, record)

    def _start(self, cri: Cri, to: str, image: str, name: str, more: str = "") -> None:
        """Start a container, and wait until the application has done its first work."""
        script = APPLICATIONS[name].start + more
        status = run_until_end(cri, to, image, "one", "/bin/sh", "-c", script)
        if status:
            raise BtrfsUblkError(f"{name} does not start: exit status {status}")

    def measure(self, name: str, subject: Subject, more: str) -> Result:
        with ExitStack() as stack:
            link = far(self.registry, *self.link)
            address, counts = stack.enter_context(link)
            others = bystanders(self.daemon)
            host = stack.enter_context(bed(self.parent))
            host.options = ["--insecure", "--writable=4G", *subject.options]
            opened = pod(host, subject.snapshotter, address)
            cri, identifier = stack.enter_context(opened)
            image = f"{address}/{name}:{subject.tag}"
            before_s, began_s = cpu_s(others), time.monotonic()
            cri.pull(image)
            pulled_s = time.monotonic() - began_s
            self._start(cri, identifier, image, name, more)
            seconds = time.monotonic() - began_s
            used_s = cpu_s(others) - before_s
            requests, size = counts()
        return {
            **{"seconds": seconds, "pulled_s": pulled_s, "cpu_s": used_s},
            **{"requests": requests, "bytes": size},
        }


@contextmanager
def _applications(
    run: Run, keep: Path, latency_ms: float, mbit: int
) -> Iterator[_Applications]:
    with ExitStack() as stack:
        keep.mkdir(parents=True, exist_ok=True)
        registry = stack.enter_context(loopback_registry(keep))
        stack.enter_context(apart(stack.enter_context(tempdir(parent=run.parent))))
        idle = Description(MIB, [PatternSegment(offset=0, length=MIB)])
        stack.enter_context(supervised_device(idle, name=_IDLE))
        link = latency_ms / 1e3, mbit * 1e6 / 8
        yield _Applications(run.parent, keep, registry, link)


def _start_tables(document: Document) -> list[Table]:
    made, results = document["images"], document["results"]
    overlayfs = [each for each in results if each["subject"] == OVERLAYFS]
    found = []
    for what in dict.fromkeys(each["what"] for each in results):
        mine = [each for each in results if each["what"] == what]

        def against(turns: Sequence[Result]) -> float:
            name = turns[0]["image"]
            peer = [x for x in overlayfs if x["image"] == name and x["what"] == what]
            return median_of(peer, "seconds") / median_of(turns, "seconds")

        def name(x: Result) -> str:
            return f"{x['image']}, {made[x['image']]['unpacked'] / MIB:.0f}"

        names = {"image": name, " ": lambda x: str(x["subject"])}

        def interval(turns: Sequence[Result]) -> str:
            low, high = bootstrap_interval([each["seconds"] for each in turns])
            return "-" if math.isnan(low) else f"{low:.2f}-{high:.2f}"

        columns = [
            TURNS,
            Column("pulled, s", "pulled_s", 2),
            Column("ready, s", "seconds", 2),
            Column("95 %", interval),
            p99("seconds"),
            Column("CPU, s", "cpu_s", 2),
            Column("requests", "requests"),
            Column("MiB", "bytes", 1, 1 / MIB),
            Column("faster than overlayfs", against, 1),
            LOAD,
        ]
        given = document["parameters"]
        title = (
            f"{what}, {given['latency_ms']:g} ms per request, {given['mbit']} Mbit/s"
        )
        note = (
            "Images with their MiB unpacked, of one layer each. P99 of few turns is "
            "the longest. CPU of containerd, snapshotters and the application, "
            "without the kernel's threads."
        )
        order = list(SUBJECTS)
        mine.sort(
            key=lambda x: (list(made).index(x["image"]), order.index(x["subject"]))
        )
        found.append(table(title, mine, names, columns, left=2, note=note))
    return found


@study(
    "containers-starts",
    click.option(
        *("--image", "images"),
        type=click.Choice(list(APPLICATIONS)),
        multiple=True,
        default=[name for name in APPLICATIONS if APPLICATIONS[name].packages],
    ),
    click.option(
        *("--subject", "subjects"),
        type=click.Choice(list(SUBJECTS)),
        multiple=True,
        default=list(SUBJECTS),
    ),
    click.option("--everything", is_flag=True, help="Read all files, too."),
    click.option(
        "--more",
        type=PathType(exists=True, dir_okay=False),
        help="Add the turns to those in this file, of a run before.",
    ),
    _latency_option,
    _mbit_option,
    _keep_option,
    limit_option,
    needs=(*NEEDS, REGISTRY, SKOPEO),
    repeats=10,
    in_memory=True,
    recorded=("latency_ms", "mbit", "everything"),
    tables=_start_tables,
)
def starts(
    run: Run,
    images: Sequence[str],
    subjects: Sequence[str],
    everything: bool,
    more: Path | None,
    latency_ms: float,
    mbit: int,
    keep: Path,
    limit_s: float,
) -> None:
    """Pull an image that this host has never seen, and start a container of it."""
    chances = _begin(run)
    until_s = time.monotonic() + limit_s
    run.document["images"] = {}
    first = 0
    if more is not None:
        old = json.loads(more.read_text())
        run.document["images"] |= old["images"]
        run.add(*old["results"])
        first = max(each["turn"] for each in old["results"])
    what = "until all is read" if everything else "until the application works"
    with _applications(run, keep, latency_ms, mbit) as place:
        for name in images:
            progress(f"make {name}")
            run.document["images"][name] = asdict(place.make(name))
        plan = [(x, y) for x in images for y in subjects]
        for turn in run.turns(tell=True):
            for name, subject in chances.sample(plan, len(plan)):
                if time.monotonic() > until_s:
                    return
                about: Result = {"what": what, "image": name, "subject": subject}
                about |= {"turn": first + turn, "load": os.getloadavg()[0]}
                took = place.measure(
                    name, SUBJECTS[subject], _ALL if everything else ""
                )
                run.add(about | took)


@click.group()
def command() -> None:
    """Measure containerd with our snapshotter against its own overlayfs."""


command.add_command(calls, "calls")
command.add_command(starts, "starts")

if __name__ == "__main__":
    # What servers print is no part of the results.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run_command(command, name="container_speed.py")
