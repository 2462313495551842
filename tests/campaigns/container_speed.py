"""Measures containerd with our snapshotter against its own overlayfs.

``python tests/campaigns/container_speed.py calls --help``: calls of the snapshots API.
``restarts``: from a kill of the snapshotter to containerd's next answer. ``starts``:
from an image that was never here to the end of what an application does first.
``parallel``: many containers at once. All have disks of their own, and take turns. Run
it by ``scripts/isolate``: mounts that others copy keep disks busy.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from signal import SIGINT
from typing import Any

import click
import grpc
from campaign import apart, limit_option
from container_bed import NEEDS, OVERLAYFS, bed, pod, run_until_end, running
from container_images import APPLICATIONS, BALLAST, KEPT, SKOPEO, Made, make_images
from container_peers import PROGRAM, STARGZ, is_built, make_optimized
from container_weights import WEIGHED, bystanders, cpu_s, weigh
from image_start import far
from support.containers import CONTAINERD, NAME, TIMEOUT_S, Cri
from support.processes import ending_with_us, stop
from support.snapshotter import Client
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import require
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


def _restart_tables(document: Document) -> list[Table]:
    results = document["results"]
    columns = [
        Column("kills", len),
        Column("it listens, s", "listens_s", 2),
        p99("listens_s"),
        Column("containerd answers, s", "answers_s", 2),
        p99("answers_s"),
        LOAD,
    ]
    title = f"From a kill of the snapshotter; started again after {_RESTART_S} s"
    return [table(title, results, {"": lambda _: "snapshotter"}, columns, left=1)]


@study(
    "containers-restarts",
    needs=NEEDS,
    repeats=20,
    in_memory=True,
    tables=_restart_tables,
)
def restarts(run: Run) -> None:
    """Kill the snapshotter, start it again as systemd does, and ask containerd."""
    _begin(run)
    numbers = count()
    with bed(run.parent) as host, running(host, serving=False), ExitStack() as stack:
        address = f"unix:{host.work}/containerd.sock"
        channel = stack.enter_context(grpc.insecure_channel(address))
        client = Client(channel, snapshotter=NAME, metadata=_NAMESPACE)

        def listens() -> bool:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
                asking.connect(f"{host.work}/snapshotter.sock")
                return True
            return False

        def answers() -> bool:
            with suppress(grpc.RpcError):
                client.call("Prepare", key=f"restarts {next(numbers)}", parent="")
                return True
            return False

        process = host.start_snapshotter()
        try:
            wait_until(answers, timeout_s=TIMEOUT_S)
            for _ in run.turns():
                time.sleep(_SETTLED_S)
                load, began_s = os.getloadavg()[0], time.monotonic()
                process.kill()
                process.wait()
                time.sleep(_RESTART_S)
                process = host.start_snapshotter()
                wait_until(listens, timeout_s=TIMEOUT_S)
                listens_s = time.monotonic() - began_s
                wait_until(answers, timeout_s=TIMEOUT_S)
                took: Result = {"listens_s": listens_s, "load": load}
                run.add(took | {"answers_s": time.monotonic() - began_s})
        finally:
            stop(process)


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
    peer_options: Sequence[str] = ()


SUBJECTS = {
    OVERLAYFS: Subject(OVERLAYFS),
    "sealed": Subject(NAME),
    "sealed, traced": Subject(NAME, "traced"),
    "sealed, traced, completed": Subject(NAME, "traced", ["--complete=1G/s"]),
    STARGZ: Subject(STARGZ, "estargz"),
    "stargz, passthrough": Subject(STARGZ, "estargz", peer_options=["passthrough"]),
}


def subjects_here() -> list[str]:
    """Return all that can be measured: stargz-snapshotter just where it was built."""
    return [x for x in SUBJECTS if SUBJECTS[x].snapshotter != STARGZ or is_built()]


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
            opened = pod(host, subject.snapshotter, address, *subject.peer_options)
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
        default=subjects_here,
        help="Without it all, and stargz where it is built.",
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
    has_peer = any(SUBJECTS[each].snapshotter == STARGZ for each in subjects)
    if has_peer:
        require(PROGRAM)
        run.document[STARGZ] = PROGRAM.name
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
            if has_peer:
                optimized = make_optimized(name, keep, place.registry)
                run.document["images"][name][STARGZ] = optimized
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


_MODES = {
    OVERLAYFS: (OVERLAYFS, ()),
    "snapshots": (NAME, ("--mode=snapshot",)),
    "overlays": (NAME, ("--mode=overlay",)),
}

PLAN = [*((x, "here") for x in _MODES), ("snapshots", "cold"), ("overlays", "cold")]


def _parallel_tables(document: Document) -> list[Table]:
    names = {"": lambda x: str(x["subject"]), " ": lambda x: str(x["data"])}
    columns = [
        Column("containers", len),
        Column("P50", "seconds", 2),
        p99("seconds"),
        Column("all, s", "all_s", 1),
        Column("CPU, s", "cpu_s", 1),
        LOAD,
    ]
    given = document["parameters"]
    pods = given.get("pods", 1)  # older results have one
    title = f"{given['count']} containers started at the same time, s"
    title += f", in {pods} pods" if pods > 1 else ""
    note = (
        "From the call that creates a container until it runs. Data that are not here "
        f"are {given['latency_ms']:g} ms and {given['mbit']} Mbit/s away. CPU of all "
        "of them together, of containerd and ours, without the kernel's threads."
    )

    def in_order(some: list[Result]) -> list[Result]:
        return sorted(some, key=lambda x: PLAN.index((x["subject"], x["data"])))

    results, weights = in_order(document["results"]), in_order(document["weights"])
    found = [table(title, results, names, columns, left=2, note=note)]
    for after, when in _WEIGHED_WHEN.items():
        rows = [each for each in weights if each["after"] == after]
        columns = [Column(x, x, 2, 1 / MIB / given["count"]) for x in WEIGHED]
        title = f"Memory for each of {given['count']} containers, MiB: {when}"
        note = (
            "What there is more than before. Pss of processes, where what they share "
            "counts once; the shim is one for each pod; slab has the kernel's stacks "
            "and page tables as well; cache is files in memory. Containers' own "
            "processes are not weighed."
        )
        found.append(table(title, rows, names, columns, left=2, note=note))
    return found


_WEIGHED_WHEN = {
    "start": "they run",
    "read": "each has read the same 8 MiB, one after the other",
}


@study(
    "containers-parallel",
    click.option("--count", type=click.IntRange(min=1), default=20, help="Of each."),
    click.option(
        *("--pods", "pods"),
        type=click.IntRange(min=1),
        default=1,
        help="Over which they are spread.",
    ),
    click.option(
        *("--subject", "subjects"),
        type=click.Choice(list(_MODES)),
        multiple=True,
        default=tuple(_MODES),
    ),
    _latency_option,
    _mbit_option,
    _keep_option,
    limit_option,
    needs=(*NEEDS, REGISTRY, SKOPEO),
    repeats=1,
    in_memory=True,
    recorded=("count", "pods", "latency_ms", "mbit"),
    tables=_parallel_tables,
)
def parallel(
    run: Run,
    count: int,
    pods: int,
    subjects: Sequence[str],
    latency_ms: float,
    mbit: int,
    keep: Path,
    limit_s: float,
) -> None:
    """Start containers of one small image all at once, whose data are all here, or, of
    a sealed image, not yet."""
    chances = _begin(run)
    until_s = time.monotonic() + limit_s
    run.document["weights"] = []
    with _applications(run, keep, latency_ms, mbit) as place:
        place.make("busybox")
        plan = [each for each in PLAN if each[0] in subjects]
        for turn in run.turns(tell=True):
            for subject, data in chances.sample(plan, len(plan)):
                if time.monotonic() > until_s:
                    return
                about = {"subject": subject, "data": data, "turn": turn}
                load = {"load": os.getloadavg()[0]}
                took, weights = _start_at_once(
                    place, subject, data == "here", count, pods
                )
                run.add(*(about | load | each for each in took))
                run.document["weights"] += [about | each for each in weights]
                progress(f"{subject}, {data}")


def _start_at_once(
    place: _Applications, subject: str, is_here: bool, count: int, pods: int
) -> tuple[list[Result], list[Result]]:
    snapshotter, options = _MODES[subject]
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(count))
        address, _ = stack.enter_context(far(place.registry, *place.link))
        others = bystanders(place.daemon)
        host = stack.enter_context(bed(place.parent))
        host.options = ["--insecure", "--writable=4G", *options]
        opened = pod(host, snapshotter, address)
        cri, identifier = stack.enter_context(opened)
        image = f"{address}/busybox:plain"
        cri.pull(image)
        if is_here:
            run_until_end(cri, identifier, image, "first", "/bin/sleep", "0")

        # One after the other, as they are no part of what is measured.
        places = [identifier]
        for number in range(1, pods):
            places.append(cri.start_pod(f"pod {number}"))
            stack.callback(cri.remove_pod, places[-1])

        def start(number: int) -> tuple[str, float]:
            began_s = time.monotonic()
            words = ("/bin/sleep", "86400")
            to = places[number % pods]
            container = cri.run(to, image, f"c{number}", *words)
            return container, time.monotonic() - began_s

        empty = weigh(_IDLE)
        before_s, began_s = cpu_s(others), time.monotonic()
        started = list(pool.map(start, range(count)))
        all_s = time.monotonic() - began_s
        used_s = cpu_s(others) - before_s
        running = weigh(_IDLE)
        for container, _ in started:
            root = Path(f"/proc/{cri.info(container)['pid']}/root")
            (root / BALLAST).read_bytes()
        read = weigh(_IDLE)
        # The end of the pod would remove them one by one.
        list(pool.map(cri.remove, (container for container, _ in started)))
    about = {"all_s": all_s, "cpu_s": used_s}
    weights = [
        {"after": after, **{x: weight[x] - empty[x] for x in WEIGHED}}
        for after, weight in (("start", running), ("read", read))
    ]
    return [about | {"seconds": x} for _, x in started], weights


@click.group()
def command() -> None:
    """Measure containerd with our snapshotter against its own overlayfs."""


command.add_command(calls, "calls")
command.add_command(restarts, "restarts")
command.add_command(starts, "starts")
command.add_command(parallel, "parallel")

if __name__ == "__main__":
    # What servers print is no part of the results.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run_command(command, name="container_speed.py")
