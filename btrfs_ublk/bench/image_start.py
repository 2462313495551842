"""How soon a program of an image ends on a host that has never seen the image, beside
what a user could have without it: fetching and unpacking the layers, by hand or by
containerd, EROFS on our lazy device, and lazy images of other projects.

``python -m btrfs_ublk.bench.image_start --help``
"""

import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import click

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, Probed, Program, require
from btrfs_ublk.base.entry import PathType, run_command
from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE, VOLUMES_VARIABLE
from btrfs_ublk.base.process import Argument, run
from btrfs_ublk.bench.bed import CURL
from btrfs_ublk.bench.cpu import RawSnapshot, Usage, children_of
from btrfs_ublk.bench.image_peers import (
    ACCESS,
    PEERS,
    REPOSITORY,
    TIMEOUT_S,
    Place,
    Start,
    containerd,
    overlaid,
)
from btrfs_ublk.bench.link import link
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.stats import grouped
from btrfs_ublk.bench.study import LOAD, TURNS, Column, Run, ratio, study, table
from btrfs_ublk.content import Addition, digest_file
from btrfs_ublk.device import supervised_device
from btrfs_ublk.errors import UsageError
from btrfs_ublk.image import (
    BuildOptions,
    Layout,
    LayoutName,
    build_image,
    index_image,
    open_repository,
    parse_reference,
    traced_ranges,
)
from btrfs_ublk.image.documents import (
    blobs_of,
    describe_blob,
    descriptors,
    parse_document,
    to_bytes,
)
from btrfs_ublk.image.store import IMAGES_VARIABLE
from btrfs_ublk.kernel.mount import mounted, unmount_now
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.server import BlockServer, Description, LazySegment, PatternSegment
from btrfs_ublk.testing.registry import REGISTRY, loopback_registry
from btrfs_ublk.units import GIB, KIB, MIB
from btrfs_ublk.volume import (
    VolumeDefinition,
    down_volume,
    fork_image,
    remove_volume,
    trace_run,
    up_volume,
)

SKOPEO = Program("skopeo", package="skopeo")
PIGZ = Program("pigz", package="pigz")
MKFS_EROFS = Program("mkfs.erofs", package="erofs-utils")
EROFS_DRIVER = Probed(
    "erofs",
    "load it: modprobe erofs",
    lambda: (
        None
        if "\terofs\n" in Path("/proc/filesystems").read_text()
        else "this kernel has none"
    ),
)
UNTAR, PULLED = "pull and untar", "containerd, overlayfs"
EROFS = "lazy EROFS, lz4hc"
#: Requests that follow each other before data can come: a connection, the tag, and what
#: it names.
_ROUND_TRIPS = 3
_START, _EVERYTHING = "to the end of the command", "until all is read"
#: Keeps the daemon alive, as it is on hosts with systemd.
_IDLE = "image-start-idle"
_NAME = "image-start-%d"
_numbers = count()


def _removed(stack: ExitStack, name: str, base: Path) -> None:
    """Have a volume removed at the end."""
    stack.callback(remove_volume, name, base=base)
    stack.callback(down_volume, name, base=base)


def _definition(place: Place, image: str, complete: int | None) -> VolumeDefinition:
    return VolumeDefinition(
        image=image,
        image_insecure=not image.startswith("oci:"),
        mount=place.work / "mnt",
        writable_bytes=GIB,
        complete=complete,
    )


def _by_api(
    tag: str, place: Place, stack: ExitStack, *, complete: int | None = None
) -> Path:
    base = place.work / "volumes"
    name = _NAME % next(_numbers)
    image = f"{place.host}/{REPOSITORY}:{tag}"
    up_volume(name, _definition(place, image, complete), base=base)
    _removed(stack, name, base)
    return fork_image(name, "one", base=base)


def _by_command(tag: str, place: Place, stack: ExitStack) -> Path:
    base = place.work / "volumes"
    name = _NAME % next(_numbers)
    argv: list[Argument] = [Path(sys.executable).with_name("btrfs-ublk"), "image", "up"]
    argv += [f"{place.host}/{REPOSITORY}:{tag}", name, "--insecure", "--fork=one"]
    argv += [f"--base={base}", f"--mount={place.work / 'mnt'}", "--writable=1G"]
    path = run(argv, timeout_s=TIMEOUT_S).stdout.strip()
    _removed(stack, name, base)
    return Path(path)


def _untar(place: Place, stack: ExitStack) -> Path:
    """What a user could do best: nothing waits for a disk, and all is done at once. Of
    several layers, nothing is deleted that an upper one deletes."""
    where, root = f"http://{place.host}/v2/{REPOSITORY}", place.directory("root")
    accept = "Accept: application/vnd.oci.image.index.v1+json"
    argv = f"""set -e -o pipefail
    curl -sfH '{accept}' {where}/manifests/plain {where}/manifests/plain > /dev/null
    for layer in {" ".join(place.layers)}; do
      curl -sf {where}/blobs/$layer | pigz -dc |
        (tar -xpC {root} --exclude='.wh.*' && cat > /dev/null)
    done
    """
    run(["bash", "-c", argv], timeout_s=TIMEOUT_S)
    return root


def _containerd(place: Place, stack: ExitStack) -> Path:
    """containerd's pull, and its overlayfs, without a container."""
    ctr, target = f"ctr --address {containerd(place, stack)}", place.directory("merged")
    image = f"{place.host}/{REPOSITORY}:plain"
    argv = f"""set -e
    {ctr} images pull --plain-http {image} > /dev/null
    {ctr} images mount --rw {image} {target} > /dev/null
    """
    run(["bash", "-c", argv], timeout_s=TIMEOUT_S)
    stack.callback(unmount_now, target)
    return target


def _erofs(place: Place, stack: ExitStack) -> Path:
    """EROFS on our block server, as lazily and as verified as ours. The digests are
    there already."""
    assert place.erofs is not None
    path, digest, digests = place.erofs
    digests.write(place.work / "digests")
    source = {
        **{"kind": "oci", "registry": place.host, "repository": REPOSITORY},
        **{"digest": digest, "insecure": True, "size": path.stat().st_size},
        **{"unit": digests.unit_bytes, "root": digests.root},
        "digests": {"path": str(place.work / "digests")},
    }
    size = path.stat().st_size
    segment = LazySegment(offset=0, length=size, map=str(place.work / "map"))
    server = stack.enter_context(BlockServer(Description(size, [segment])))
    server.map_add([source], [Addition(offset=0, length=size)])
    lower = place.directory("lower")
    stack.enter_context(mounted(server.device, lower, fs_type="erofs", read_only=True))
    return overlaid(place, lower, stack)


SUBJECTS: dict[str, Start] = {
    UNTAR: _untar,
    PULLED: _containerd,
    EROFS: _erofs,
    "image, API": partial(_by_api, "plain"),
    "image, command": partial(_by_command, "plain"),
    "image, nothing first, API": partial(_by_api, "bare"),
    "traced image, API": partial(_by_api, "traced"),
    "traced image, command": partial(_by_command, "traced"),
    # The ordinary image, and an index that refers to it.
    "indexed image, API": partial(_by_api, "indexed"),
    # Fetched in the background, as fast as it comes.
    "image, completed": partial(_by_api, "plain", complete=GIB),
    "traced image, completed": partial(_by_api, "traced", complete=GIB),
}
_NAMES = [*SUBJECTS, *PEERS]
_OF_LAYOUTS = [
    *(UNTAR, PULLED, "image, API", "image, command"),
    *("traced image, API", "traced image, command"),
]
DEFAULTS = (
    *(UNTAR, EROFS, "image, API", "image, command"),
    *("traced image, API", "traced image, command"),
)


def _memory_bytes(pid: int) -> int:
    """Return the proportional set size, in which processes share what they share."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * KIB
    return 0


def _measure(
    place: Place, subject: str, round_trip_s: float, rate: float, everything: bool
) -> Result:
    with ExitStack() as stack:
        work = stack.enter_context(tempdir(parent=place.root))
        host, _, port = place.registry.partition(":")
        address, requests = stack.enter_context(
            link((host, int(port)), round_trip_s=round_trip_s, bytes_per_s=rate)
        )
        turn = replace(place, host=address, work=work)
        (turn.directory("settings") / "images.toml").write_text(
            f'[[allow]]\nfrom = "{address}/*"\n'
        )
        os.environ[CONFIG_VARIABLE] = str(work / "settings")
        os.environ[IMAGES_VARIABLE] = str(work / "images")
        os.environ[VOLUMES_VARIABLE] = str(work / "volumes")
        there = RawSnapshot.take().parse().processes
        proxies = children_of(os.getpid())
        peer = PEERS.get(subject)
        start = peer.begin(turn, stack) if peer else SUBJECTS[subject]
        before = RawSnapshot.take()
        began_s = time.monotonic()
        path = start(turn, stack)
        run(["chroot", path, *place.words], timeout_s=TIMEOUT_S)
        if everything:
            argv = (
                f"set -o pipefail; tar --one-file-system -cC {path} . | cat > /dev/null"
            )
            run(["bash", "-c", argv], timeout_s=TIMEOUT_S)
        ended_s = time.monotonic()
        used = Usage(before.parse(), RawSnapshot.take().parse(), {"proxies": proxies})
        servers = used.after.processes.keys() - there.keys()
        memory_bytes = sum(map(_memory_bytes, servers))
        found = [each for each in requests() if each.began_s < ended_s]
    moved = sum(each.bytes for each in found)
    on_link_s = moved / rate if rate else 0.0
    return {
        "seconds": ended_s - began_s,
        "requests": len(found),
        "bytes": moved,
        "cpu_s": used.record()["rest"] * used.window_s,
        "memory_bytes": memory_bytes,
        "first_request_s": min(each.began_s for each in found) - began_s,
        "limit_s": _ROUND_TRIPS * round_trip_s + on_link_s,
    }


@contextmanager
def _placed(
    parent: Path, tree: Path, words: Sequence[str], subjects: Sequence[str]
) -> Iterator[Place]:
    """Fill a registry with what is compared: the tree as an ordinary image of one gzip
    layer with its sealed image, once more with a trace, as an ordinary one that only
    has an index, as EROFS, and as peers need it."""
    with ExitStack() as stack:
        root = stack.enter_context(tempdir(parent=parent))
        ordinary, layout, index = root / "ordinary", root / "layout", root / "index"
        argv = ["skopeo", "copy", "--quiet", f"tarball:{tree}", f"oci:{ordinary}:plain"]
        run(argv, timeout_s=TIMEOUT_S)
        _give_command(Layout.opened(ordinary), words)
        idle = Description(MIB, [PatternSegment(offset=0, length=MIB)])
        stack.enter_context(supervised_device(idle, name=_IDLE))
        source, unpacked = LayoutName(ordinary, "plain"), root / "tree"
        build_image(source, layout, BuildOptions())
        build_image(source, layout, BuildOptions(first=()), tag="bare")
        erofs = root / "lz4hc.erofs"
        unpacked.mkdir()
        run(["tar", "-xpf", tree, "-C", unpacked], timeout_s=TIMEOUT_S)
        run(["mkfs.erofs", "--quiet", "-zlz4hc", erofs, unpacked], timeout_s=TIMEOUT_S)
        manifest = json.loads(
            Layout.opened(ordinary).read(Layout.opened(ordinary).find("plain"))
        )
        (layer,) = manifest["layers"]
        with erofs.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        image = (erofs, digest, digest_file(erofs))
        work = stack.enter_context(tempdir(parent=root))
        trace = trace_run(f"oci:{layout}:plain", words, work)
        first = traced_ranges(trace, layout, None, ACCESS)
        build_image(source, layout, BuildOptions(first=first), tag="traced")
        index_image(source, index, BuildOptions(), tag="indexed")
        # NB: trace_run() ends all children of this process.
        registry = stack.enter_context(loopback_registry(root))
        place = Place(root, registry, [layer["digest"]], image, words)
        for path, name, tag in (
            (layout, "plain", "plain"),
            (layout, "bare", "bare"),
            (layout, "traced", "traced"),
            (ordinary, "plain", "indexed"),
            (index, "indexed", "indexed"),
        ):
            place.push(path, name, tag)
        target = parse_reference(f"{registry}/{REPOSITORY}:plain")
        with open_repository(target, ACCESS, writing=True) as repository:
            size = erofs.stat().st_size
            one = describe_blob("application/octet-stream", digest, size)
            repository.upload(one, erofs)
        for fill in {PEERS[each].fill: None for each in subjects if each in PEERS}:
            fill(place, ordinary, unpacked)
        run(["rm", "-r", unpacked, layout, index], timeout_s=TIMEOUT_S)
        yield place


@contextmanager
def _given(
    parent: Path, layout: Path, words: Sequence[str], kinds: Sequence[str]
) -> Iterator[Place]:
    """Fill a registry with the images of a layout that ``kinds`` of subjects need."""
    tags = {"plain"}
    tags |= {"traced" for each in kinds if each.startswith("traced")}
    opened = Layout.opened(layout)
    index = parse_document(opened.read(opened.find("plain")), str(layout))
    ordinary, _ = descriptors(index, "manifests", str(layout))
    manifest = parse_document(opened.read(ordinary), str(layout))
    with ExitStack() as stack:
        root = stack.enter_context(tempdir(parent=parent))
        idle = Description(MIB, [PatternSegment(offset=0, length=MIB)])
        stack.enter_context(supervised_device(idle, name=_IDLE))
        registry = stack.enter_context(loopback_registry(root))
        layers = descriptors(manifest, "layers", str(layout))
        place = Place(root, registry, [each.digest for each in layers], None, words)
        for tag in sorted(tags):
            place.push(layout, tag, tag)
        yield place


def _give_command(layout: Layout, words: Sequence[str]) -> None:
    """Have the image ``plain`` say what is run in it, as those of registries do."""
    one = layout.find("plain")
    manifest = json.loads(layout.read(one))
    blob, *_ = blobs_of(manifest, one.digest)
    config = json.loads(layout.read(blob)) | {"config": {"Cmd": list(words)}}
    manifest["config"] = layout.add(blob.media_type, to_bytes(config)).raw
    layout.tag(layout.add(one.media_type, to_bytes(manifest)), "plain")


def tables(document: Document) -> list[Table]:
    """Make a table for each distance and what is read."""

    def to_limit(turns: Sequence[Result]) -> float:
        return float(median(x["seconds"] / x["limit_s"] for x in turns))

    found = []
    groups = grouped(document["results"], lambda x: (x["what"], x["far"]))
    for (what, far), results in groups.items():
        results.sort(key=lambda x: _NAMES.index(x["subject"]))
        found.append(
            table(
                f"{what}, {far}",
                results,
                {"": lambda x: str(x["subject"])},
                [
                    *(TURNS, Column("s", "seconds", 2, best=True)),
                    Column("first request, s", "first_request_s", 2),
                    Column("requests", "requests"),
                    Column("MB", "bytes", 1, 1e-6),
                    Column("CPU, s", "cpu_s", 2),
                    Column("servers, MiB", "memory_bytes", 1, 1 / MIB),
                    Column("limit, s", "limit_s", 2),
                    Column("to the limit", to_limit, 2),
                    ratio(results, UNTAR, "seconds"),
                    LOAD,
                ],
                note="The limit: three round trips, and what was moved at the link's "
                "rate, headers included. CPU: of the whole machine without registry "
                "and link. Servers: the proportional set size of what was started.",
            )
        )
    return found


@study(
    "image_start",
    click.option(
        "--tree",
        type=PathType(exists=True, dir_okay=False),
        help="A tar of a root file system: mmdebstrap --variant=minbase "
        "--include=python3 bookworm TAR.",
    ),
    click.option(
        "--layout",
        type=PathType(exists=True, file_okay=False),
        help="Instead of a tar: what btrfs-ublk image build IMAGE --output LAYOUT "
        "--tag plain has made, and for traced images once more with --tag traced.",
    ),
    click.option(
        "--run",
        "words",
        default="python3 -c import\\ json,ssl,sqlite3",
        help="What runs in it, in words of a shell.",
    ),
    click.option(
        *("--far", "links"),
        type=(float, float),
        multiple=True,
        default=((20.0, 100.0), (0.0, 1000.0)),
        help="Milliseconds of round trip, and Mbit/s.",
    ),
    click.option("--everything", is_flag=True, help="Then read all files as well."),
    click.option(
        *("--subject", "subjects"),
        type=click.Choice(_NAMES),
        multiple=True,
        default=DEFAULTS,
    ),
    needs=(
        *(ROOT, BTRFS, LOOP, EROFS_DRIVER, MKFS_EROFS),
        *(REGISTRY, SKOPEO, CURL, PIGZ),
    ),
    repeats=5,
    in_memory=True,
    recorded=("words", "everything"),
)
def command(
    run: Run,
    tree: Path | None,
    layout: Path | None,
    words: str,
    links: Sequence[tuple[float, float]],
    everything: bool,
    subjects: Sequence[str],
) -> None:
    """Start a program of an image that this host has never seen, by turns in an order
    that is drawn anew for each. A proxy delays and limits all that the registry, which
    is on loopback, answers, and notes when.
    """
    argv, others = shlex.split(words), {*subjects} - {*_OF_LAYOUTS}
    if layout is not None and others:
        raise UsageError(
            f"a layout has nothing for {', '.join(sorted(others))}",
            hint=f"--subject is one of these: {', '.join(_OF_LAYOUTS)}",
        )
    if layout is not None:
        placed = _given(run.parent, layout, argv, subjects)
    elif tree is not None:
        require(*{x: None for y in subjects if y in PEERS for x in PEERS[y].needs})
        placed = _placed(run.parent, tree, argv, subjects)
    else:
        raise UsageError("there is no image to start", hint="give --tree or --layout")
    with placed as place:
        plan = [(x, y) for x in links for y in subjects]
        for (round_trip_ms, mbit), subject in run.drawn(plan):
            far = f"{round_trip_ms:g} ms, {mbit:g} Mbit/s"
            link_s, rate = round_trip_ms / 1e3, mbit * 1e6 / 8
            result = _measure(place, subject, link_s, rate, everything)
            what = _EVERYTHING if everything else _START
            if layout is not None:
                what += f", {len(place.layers)} layers"
            run.add({"what": what, "far": far, "subject": subject} | result)


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.image_start")
