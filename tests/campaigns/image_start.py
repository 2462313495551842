"""Measures how soon a root file system of an image can be used: from a registry that
was never asked before to the end of ``chroot … /bin/true``, or until all is read.

``python tests/campaigns/image_start.py --help``. All answers of the registry, which is
on loopback, pass a proxy that delays them, and share a link of a limited rate.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import click
import psutil
from fault_proxy import FaultProxy

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, Program
from btrfs_ublk.base.entry import PathType, run_command
from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE
from btrfs_ublk.base.process import run
from btrfs_ublk.bench.bed import CURL
from btrfs_ublk.bench.file_systems import (
    EROFS,
    MKFS_EROFS,
    OVERLAY,
    make_erofs,
    on_loop,
    overlay,
)
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.stats import bootstrap_interval, grouped
from btrfs_ublk.bench.study import LOAD, TURNS, Column, Run, ratio, study, table
from btrfs_ublk.content import Addition, Digests, Trace, digest_file
from btrfs_ublk.content.trace import TraceSource, TraceWriter
from btrfs_ublk.device import device_map, show_device, supervised_device
from btrfs_ublk.image import (
    BuildOptions,
    Layout,
    LayoutName,
    RegistryAccess,
    build_image,
    index_image,
    open_repository,
    parse_reference,
    push_image,
    traced_ranges,
)
from btrfs_ublk.image.documents import Descriptor
from btrfs_ublk.image.store import IMAGES_VARIABLE
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.server import (
    BlockServer,
    Description,
    LazySegment,
    PatternSegment,
)
from btrfs_ublk.testing.registry import REGISTRY, loopback_registry
from btrfs_ublk.units import GIB, MIB
from btrfs_ublk.volume import (
    VolumeDefinition,
    down_volume,
    fork_image,
    remove_volume,
    up_volume,
)

SKOPEO = Program("skopeo", package="skopeo")
PIGZ = Program("pigz", package="pigz")
UNTAR = "pull and unpack"
_TIMEOUT_S = 300.0
_NAME = "image-start-%d"
_ACCESS = RegistryAccess(insecure=True)
_REPOSITORY = "tree"
#: Keeps the daemon alive, as it is on hosts with systemd.
_IDLE = "image-start-idle"


@dataclass(frozen=True)
class Place:
    """What all turns share: the registry, and what is in it. ``host`` is the proxy's
    address during a turn, ``work`` a new directory in memory."""

    root: Path
    registry: str
    layer: str
    erofs: dict[str, tuple[Path, str, Digests]]
    host: str = ""
    work: Path = Path()
    pids: set[int] = field(default_factory=set)

    def directory(self, name: str) -> Path:
        path = self.work / name
        path.mkdir()
        return path


#: Makes a root file system; the stack takes it away again.
Start = Callable[[Place, ExitStack], Path]
_numbers = count()


def _sealed(
    tag: str, place: Place, stack: ExitStack, *, complete: int | None = None
) -> Path:
    (place.directory("settings") / "images.toml").write_text(
        f'[[allow]]\nfrom = "{place.host}/*"\n'
    )
    os.environ[CONFIG_VARIABLE] = str(place.work / "settings")
    os.environ[IMAGES_VARIABLE] = str(place.work / "images")
    name = _NAME % next(_numbers)
    definition = VolumeDefinition(
        image=f"{place.host}/{_REPOSITORY}:{tag}",
        image_insecure=True,
        mount=place.work / "mnt",
        writable_bytes=GIB,
        complete=complete,
    )
    base = place.work / "volumes"
    stack.callback(remove_volume, name, base=base)
    stack.callback(down_volume, name, base=base)
    up_volume(name, definition, base=base)
    path = fork_image(name, "one", base=base)
    state = show_device(name).state
    assert state.server and state.supervisor
    place.pids.update({state.server.pid, state.supervisor.pid})
    return path


def _untar(place: Place, stack: ExitStack) -> Path:
    """What a user could do best: nothing waits for a disk, and all is done at once."""
    where = f"http://{place.host}/v2/{_REPOSITORY}"
    accept = "Accept: application/vnd.oci.image.index.v1+json"
    argv = f"""set -e -o pipefail
    curl -sfH '{accept}' {where}/manifests/plain {where}/manifests/plain > /dev/null
    curl -sf {where}/blobs/{place.layer} | pigz -dc | tar -xpC {place.directory("root")}
    """
    run(["bash", "-c", argv], timeout_s=_TIMEOUT_S)
    return place.work / "root"


def _overlaid(lower: Path, place: Place, stack: ExitStack) -> Path:
    target = place.directory("merged")
    stack.enter_context(overlay(lower, place.directory("upper"), target))
    return target


def _local_erofs(kind: str, place: Place, stack: ExitStack) -> Path:
    image, _, _ = place.erofs[kind]
    target = place.directory("lower")
    stack.enter_context(on_loop(image, target, fs_type="erofs", read_only=True))
    return _overlaid(target, place, stack)


def _lazy_erofs(kind: str, place: Place, stack: ExitStack) -> Path:
    """EROFS on our block server, as lazily and as verified as ours. The digests are
    there already."""
    path, digest, digests = place.erofs[kind]
    digests.write(place.work / "digests")
    source = {
        **{"kind": "oci", "registry": place.host, "repository": _REPOSITORY},
        **{"digest": digest, "insecure": True, "size": path.stat().st_size},
        **{"unit": digests.unit_bytes, "root": digests.root},
        "digests": {"path": str(place.work / "digests")},
    }
    size = path.stat().st_size
    segment = LazySegment(offset=0, length=size, map=str(place.work / "map"))
    server = stack.enter_context(BlockServer(Description(size, [segment])))
    server.map_add([source], [Addition(offset=0, length=size)])
    place.pids.add(server.pid)
    target = place.directory("lower")
    stack.enter_context(mounted(server.device, target, fs_type="erofs", read_only=True))
    return _overlaid(target, place, stack)


SUBJECTS: dict[str, Start] = {
    "sealed image": partial(_sealed, "plain"),
    "sealed image, traced": partial(_sealed, "traced"),
    # Fetched in the background, as fast as it comes.
    "sealed image, completed": partial(_sealed, "traced", complete=GIB),
    # The ordinary image, and an index that refers to it.
    "indexed image": partial(_sealed, "indexed"),
    "indexed image, completed": partial(_sealed, "indexed", complete=GIB),
    UNTAR: _untar,
    "lazy EROFS": partial(_lazy_erofs, "plain"),
    "lazy EROFS, lz4hc": partial(_lazy_erofs, "lz4hc"),
    "local EROFS": partial(_local_erofs, "plain"),
}


def _proxy(registry: str, latency_s: float, rate: float, pipe: Connection) -> None:
    host, _, port = registry.partition(":")
    with FaultProxy((host, int(port)), latency_s=latency_s, rate=rate) as proxy:
        pipe.send(proxy.port)
        while pipe.recv():
            pipe.send((proxy.counts.requests, proxy.counts.body_bytes))


@contextmanager
def far(
    registry: str, latency_s: float, rate: float
) -> Iterator[tuple[str, Callable[[], tuple[int, int]]]]:
    """Run the proxy, in a process of its own; yields its address, and what tells how
    many requests and bytes it has passed on."""
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_proxy, args=(registry, latency_s, rate, its)
    )
    process.start()

    def counts() -> tuple[int, int]:
        ours.send(True)
        requests, size = ours.recv()
        return int(requests), int(size)

    try:
        yield f"127.0.0.1:{ours.recv()}", counts
    finally:
        ours.send(False)
        process.join()


def _own_cpu_s() -> float:
    used = [resource.getrusage(each) for each in (-1, 0)]  # children, self
    return sum(each.ru_utime + each.ru_stime for each in used)


def _server_cpu_s(pids: set[int]) -> dict[int, float]:
    times = {pid: psutil.Process(pid).cpu_times() for pid in pids}
    return {pid: each.user + each.system for pid, each in times.items()}


def _measure(
    place: Place, subject: str, latency_ms: float, rate: float, everything: bool
) -> Result:
    with ExitStack() as stack:
        work = stack.enter_context(tempdir(parent=place.root))
        link = far(place.registry, latency_ms / 1e3, rate)
        host, counts = stack.enter_context(link)
        turn = Place(place.root, place.registry, place.layer, place.erofs, host, work)
        if daemon := show_device(_IDLE).state.supervisor:
            turn.pids.add(daemon.pid)
        servers_s, own_s = _server_cpu_s(turn.pids), _own_cpu_s()
        began_s = time.monotonic()
        path = SUBJECTS[subject](turn, stack)
        run(["chroot", path, "/bin/true"], timeout_s=_TIMEOUT_S)
        if everything:
            argv = (
                f"set -o pipefail; tar --one-file-system -cC {path} . | cat > /dev/null"
            )
            run(["bash", "-c", argv], timeout_s=_TIMEOUT_S)
        seconds = time.monotonic() - began_s
        cpu_s = _own_cpu_s() - own_s
        for pid, used_s in _server_cpu_s(turn.pids).items():
            cpu_s += used_s - servers_s.get(pid, 0.0)
        requests, size = counts()
    return {"seconds": seconds, "cpu_s": cpu_s, "requests": requests, "bytes": size}


def _trace(place: Place, layout: Path) -> Trace:
    """Record what a start reads of the image."""
    path = place.root / "trace"
    with ExitStack() as stack:
        work = stack.enter_context(tempdir(parent=place.root))
        name = _NAME % next(_numbers)
        definition = VolumeDefinition(
            image=f"oci:{layout}:plain", mount=work / "mnt", writable_bytes=GIB
        )
        base = work / "volumes"
        stack.callback(remove_volume, name, base=base)
        stack.callback(down_volume, name, base=base)
        up_volume(name, definition, base=base)
        client = device_map(name)
        recording, unit = client.trace_start()
        root = fork_image(name, "one", base=base)
        run(["chroot", root, "/bin/true"], timeout_s=_TIMEOUT_S)
        page = client.trace_read(recording, 0, stop=True)

        def describe(source: int) -> TraceSource:
            keys = client.show(source=source)["source"]["description"]
            return TraceSource.describe({**keys, "unit": unit})

        with path.open("w") as file:
            writer = TraceWriter(file)
            writer.add([tuple(read) for read in page["reads"]], describe)
            writer.end(lost=page["lost"], seconds=page["seconds"])
    return Trace.load(path)


@contextmanager
def _placed(parent: Path, tree: Path, subjects: Sequence[str]) -> Iterator[Place]:
    """Fill a registry with what is compared: the tree as an ordinary image of one gzip
    layer with its sealed image, once more with a trace, as an ordinary one that only
    has an index, and as EROFS."""
    with ExitStack() as stack:
        root = stack.enter_context(tempdir(parent=parent))
        registry = stack.enter_context(loopback_registry(root))
        ordinary, layout = root / "ordinary", root / "layout"
        argv = ["skopeo", "copy", "--quiet", f"tarball:{tree}", f"oci:{ordinary}:plain"]
        run(argv, timeout_s=_TIMEOUT_S)
        source = LayoutName(ordinary, "plain")
        build_image(source, layout, BuildOptions())
        pushed = [(layout, "plain", "plain")]
        if {"sealed image, traced", "sealed image, completed"} & set(subjects):
            place = Place(root, registry, "", {})
            options = BuildOptions(
                first=traced_ranges(_trace(place, layout), layout, None, _ACCESS)
            )
            build_image(source, layout, options, tag="traced")
            pushed.append((layout, "traced", "traced"))
        index = root / "index"
        index_image(source, index, BuildOptions(), tag="indexed")
        pushed += [(ordinary, "plain", "indexed"), (index, "indexed", "indexed")]
        for path, name, tag in pushed:
            opened = Layout.opened(path)
            target = parse_reference(f"{registry}/{_REPOSITORY}:{tag}")
            with open_repository(target, _ACCESS, writing=True) as repository:
                push_image(opened, opened.find(name), target, repository)
        unpacked = root / "tree"
        unpacked.mkdir()
        run(["tar", "-xpf", tree, "-C", unpacked], timeout_s=_TIMEOUT_S)
        erofs = {}
        kinds: dict[str, list[str]] = {"plain": [], "lz4hc": ["-zlz4hc"]}
        if not any("EROFS" in subject for subject in subjects):
            kinds.clear()
        for kind, words in kinds.items():
            image = root / f"{kind}.erofs"
            make_erofs(unpacked, image, *words)
            digest = f"sha256:{_sha256(image)}"
            one = Descriptor("application/octet-stream", digest, _size_of(image), {})
            with open_repository(target, _ACCESS, writing=True) as repository:
                repository.upload(one, image)
            erofs[kind] = image, digest, digest_file(image)
        run(["rm", "-r", unpacked, layout, index], timeout_s=_TIMEOUT_S)
        idle = Description(MIB, [PatternSegment(offset=0, length=MIB)])
        stack.enter_context(supervised_device(idle, name=_IDLE))
        yield Place(root, registry, _layer(ordinary), erofs)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size_of(path: Path) -> int:
    return path.stat().st_size


def _layer(layout: Path) -> str:
    opened = Layout.opened(layout)
    manifest = json.loads(opened.read(opened.find("plain")))
    (layer,) = manifest["layers"]
    return str(layer["digest"])


def tables(document: Document) -> list[Table]:
    """Make a table for each distance and what is read."""

    def interval(turns: list[Result]) -> str:
        low, high = bootstrap_interval([each["seconds"] for each in turns])
        return "-" if low != low else f"{low:.2f}-{high:.2f}"

    found = []
    given = document["parameters"]
    groups = grouped(document["results"], lambda x: (x["what"], x["latency_ms"]))
    for (what, latency_ms), results in sorted(groups.items(), reverse=True):
        results.sort(key=lambda x: list(SUBJECTS).index(x["subject"]))
        found.append(
            table(
                f"{what}, {latency_ms:g} ms per request, {given['mbit']} Mbit/s",
                results,
                {"": lambda x: str(x["subject"])},
                [
                    TURNS,
                    Column("s", "seconds", 2),
                    Column("95 %", interval),
                    Column("CPU, s", "cpu_s", 2),
                    Column("requests", "requests"),
                    Column("MiB", "bytes", 2, 1 / MIB),
                    ratio(results, UNTAR, "seconds"),
                    LOAD,
                ],
                note="CPU of programs, servers and the daemon, without the kernel's "
                "threads. Local EROFS has all data on this machine before.",
            )
        )
    return found


START, EVERYTHING = "to the end of /bin/true", "until all is read"


@study(
    "image_start",
    click.option(
        "--tree",
        type=PathType(exists=True, dir_okay=False),
        required=True,
        help="A tar of a root file system: mmdebstrap --variant=minbase trixie TAR.",
    ),
    click.option(
        *("--latency", "latencies_ms"),
        type=click.FloatRange(min=0),
        multiple=True,
        default=(0.0, 20.0),
        help="Of each request, in ms.",
    ),
    click.option("--mbit", type=click.IntRange(min=0), default=100, help="The rate."),
    click.option("--everything", is_flag=True, help=f"Measure {EVERYTHING} instead."),
    click.option(
        *("--subject", "subjects"),
        type=click.Choice(list(SUBJECTS)),
        multiple=True,
        default=tuple(SUBJECTS),
    ),
    needs=(
        *(ROOT, BTRFS, LOOP, EROFS, OVERLAY, MKFS_EROFS),
        *(REGISTRY, SKOPEO, CURL, PIGZ),
    ),
    repeats=5,
    in_memory=True,
    recorded=("mbit", "everything"),
    tables=tables,
)
def command(
    run: Run,
    tree: Path,
    latencies_ms: Sequence[float],
    mbit: int,
    everything: bool,
    subjects: Sequence[str],
) -> None:
    """Start from an image that this host has never seen, or read all of it, by turns in
    an order that is drawn anew for each."""
    chances = random.Random(1)
    run.document["script"] = "tests/campaigns/image_start.py"
    what = EVERYTHING if everything else START
    with _placed(run.parent, tree, subjects) as place:
        plan = [(x, y) for x in latencies_ms for y in subjects]
        for turn in run.turns(tell=True):
            for latency_ms, subject in chances.sample(plan, len(plan)):
                about = {"what": what, "latency_ms": latency_ms, "subject": subject}
                about |= {"turn": turn, "load": os.getloadavg()[0]}
                took = _measure(place, subject, latency_ms, mbit * 1e6 / 8, everything)
                run.add(about | took)


if __name__ == "__main__":
    run_command(command, name="image_start.py")
