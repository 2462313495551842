"""Has sources and caches of a lazy device fail in one or two ways at once, while
readers verify each byte, and heals them: ``python tests/campaigns/faults.py --help``.

The device's object comes over HTTP and TLS, from a registry that wants tokens, an S3
store, or a server that spoils answers, half of the time with a second mirror that is
well, and half of the time with a cache on a disk that is too small for all of it. Reads
are right, or EIO in time where the source fails and there is no other; a bounded time
after the end of the faults, and once more with the cache that they have left, all are
right. fault_site.py has the servers, names and certificates.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import signal
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import campaign
import click
import psutil
from campaign import Run
from fault_site import Site, site
from spoiling_server import FAULTS, Faults, SpoilingServer
from support.disks import MAKE, logged_disk
from support.registry import REGISTRY
from support.s3_server import WEED
from support.verified_reads import verified_reads

from btrfs_ublk.base.capabilities import LOOP, ROOT, require
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.process import run
from btrfs_ublk.bench.origin import NGINX
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.content import Addition, digest_file
from btrfs_ublk.kernel import loop_device, mounted
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.server import BlockServer, Description, FrontEndName, LazySegment
from btrfs_ublk.units import KIB, MIB

SOURCES = ("http", "oci", "s3", "spoilt")
_OBJECT_BYTES, _DISK_BYTES, _UNIT_BYTES = 32 * MIB, 24 * MIB, 64 * KIB
#: Few, so that reads wait for data, and not for their turn in the kernel.
_DEPTH = 8
#: Until it is well again.
_PATIENCE_S = 180.0
#: Until all reads succeed: time for circuit breakers and names, besides a deadline,
#: which is what requests take that are pending.
_HEAL_TIMEOUT_S = 30
#: Where the campaign itself, and with it its name server, has no CPU for so long, no
#: time counts.
_STALL_S = 1
_HEALED_S, _AGAIN_S, _LOOK_S = 2.0, 1.0, 0.05
#: The longest time after its deadline at which a read may fail.
_LATE_S = 4
#: A mapped read may be four reads of the kernel in turn: read-ahead by madvise() and by
#: the fault, and the page twice, as a fault that has dropped its lock to wait is begun
#: again, whatever the result of the read (filemap_fault(), mm/filemap.c).
_KERNEL_READS = {"direct": 1, "mmap": 4}
_EXPECTED = {"direct": "EIO", "mmap": "SIGBUS"}
_SPOILT_SHARES = (0.01, 0.1, 1.0)
_BLKFLSBUF = 0x1261  # linux/fs.h
_EXT4_IOC_SHUTDOWN = 0x8004587D  # fs/ext4/ext4.h
_TIMEOUT_S = 60


@dataclass
class Bed:
    """What may fail in a round. ``cache`` is None where there is none."""

    site: Site
    server: BlockServer
    source: str
    spoiling: SpoilingServer
    cache: Path | None
    loop: str
    chance: random.Random
    picked: list[Any]  #: how they fail, for the result

    def pick(self, choices: Sequence[Any]) -> Any:
        self.picked.append(self.chance.choice(choices))
        return self.picked[-1]


_Fault = Callable[[Bed], AbstractContextManager[None]]


@contextmanager
def _measured_stalls(result: Result) -> Iterator[None]:
    """Note how long this process had no CPU at a time: others, and reads, had none."""
    result["stall_s"], last_s = 0.0, time.monotonic()

    def look() -> None:
        nonlocal last_s
        now_s = time.monotonic()
        result["stall_s"] = max(result["stall_s"], now_s - last_s - _LOOK_S)
        last_s = now_s

    with campaign.repeated(look, pause_s=_LOOK_S):
        yield


@contextmanager
def _restart(bed: Bed) -> Iterator[None]:
    """Server, registry and token server are killed; tokens of before are refused."""
    bed.site.one.stop()
    yield
    bed.site.one.start()


@contextmanager
def _names(bed: Bed) -> Iterator[None]:
    """The name still leads to the old address for a while, or to none."""
    names = bed.site.names
    kind = bed.pick(("moves", "moves", "fails", "silent"))
    bed.site.one.move()
    if kind != "moves":
        names.mode = kind
    yield
    names.mode = "answers"
    bed.site.publish()


@contextmanager
def _certificate(bed: Bed) -> Iterator[None]:
    """It expires, or is of an authority that is trusted a while later."""
    one = bed.site.one
    if bed.pick(("expires", "authority")) == "expires":
        one.certify(until_s=1)
        _reload(bed)
        time.sleep(1.5)
        _reload(bed)
        yield
        one.certify()
        _reload(bed)
    else:
        one.replace_authority()
        _reload(bed)
        yield
        one.trust()


def _reload(bed: Bed) -> None:
    bed.site.one.stop()
    bed.site.one.start()


@contextmanager
def _node(bed: Bed) -> Iterator[None]:
    """Nothing of it is heard any more, not even a reset."""
    bed.site.one.machine.unplug()
    yield
    bed.site.one.machine.plug()


@contextmanager
def _link(bed: Bed) -> Iterator[None]:
    bed.site.one.machine.limit(bed.pick((300e3, 2e6, 10e6)))
    yield
    bed.site.one.machine.limit(None)


@contextmanager
def _spoilt(bed: Bed) -> Iterator[None]:
    kind, share = bed.pick(FAULTS), bed.pick(_SPOILT_SHARES)
    bed.spoiling.faults = Faults(kind, share)
    yield
    bed.spoiling.faults = Faults()


@contextmanager
def _fetcher(bed: Bed) -> Iterator[None]:
    """The process that asks servers is killed or stopped, again and again."""
    number = bed.pick((signal.SIGKILL, signal.SIGSTOP))

    def disturb() -> None:
        with suppress(psutil.Error):
            for process in psutil.Process(bed.server.pid).children():
                if process.name() == "btrfs-ublk-fetch":
                    process.send_signal(number)
                    time.sleep(bed.chance.choice((0.05, 0.3, 1.5)))
                    process.send_signal(signal.SIGCONT)

    with campaign.repeated(disturb, pause_s=1.0):
        yield


def _files(bed: Bed) -> list[Path]:
    assert bed.cache is not None
    return [x for x in bed.cache.iterdir() if x.suffix in (".data", ".bits")]


@contextmanager
def _slow_disk(bed: Bed) -> Iterator[None]:
    """Its server is stopped again and again, and nothing is in memory."""
    children = psutil.Process().children()
    (server,) = (x for x in children if "support.disks" in x.cmdline())

    def halt() -> None:
        with suppress(OSError):  # another fault has taken them away
            for path in _files(bed):
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        server.send_signal(signal.SIGSTOP)
        time.sleep(bed.chance.choice((0.05, 0.3, 1.5)))
        server.send_signal(signal.SIGCONT)

    with campaign.repeated(halt, pause_s=0.2):
        yield


@contextmanager
def _full_disk(bed: Bed) -> Iterator[None]:
    """Others take all that becomes free."""
    assert bed.cache is not None
    hog = bed.cache.parent / "hog"
    with hog.open("wb", buffering=0) as file:

        def grow() -> None:
            with suppress(OSError):
                while True:
                    file.write(bytes(MIB))

        grow()
        with campaign.repeated(grow, pause_s=0.1):
            yield
    with suppress(OSError):  # another fault has made it read-only
        hog.unlink()


@contextmanager
def _read_only_disk(bed: Bed) -> Iterator[None]:
    """As ext4 makes it after an error. Only an unmount heals that."""
    Path(f"/sys/fs/ext4/{bed.loop}/trigger_fs_error").write_text("faults.py")
    yield


@contextmanager
def _lost_disk(bed: Bed) -> Iterator[None]:
    """All that is asked of it is EIO. Only an unmount heals that."""
    assert bed.cache is not None
    with suppress(OSError):  # it is read-only, after an error
        directory = os.open(bed.cache, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, _EXT4_IOC_SHUTDOWN, struct.pack("I", 2))
        finally:
            os.close(directory)
    yield


@contextmanager
def _rotting_disk(bed: Bed) -> Iterator[None]:
    def rot() -> None:
        with suppress(OSError):  # a file that is new, or another fault
            path = bed.chance.choice(_files(bed))
            with path.open("r+b", buffering=0) as file:
                offset = bed.chance.randrange(path.stat().st_size)
                file.seek(offset)
                spoilt = bytes(x ^ 1 << bed.chance.randrange(8) for x in file.read(8))
                file.seek(offset)
                file.write(spoilt)

    with campaign.repeated(rot, pause_s=0.02):
        yield


_OF_SOURCE: dict[str, _Fault] = {
    "restart": _restart,
    "names": _names,
    "certificate": _certificate,
    "node": _node,
    "link": _link,
    "spoilt": _spoilt,
    "fetcher": _fetcher,
}
_OF_CACHE: dict[str, _Fault] = {
    "slow disk": _slow_disk,
    "full disk": _full_disk,
    "read-only disk": _read_only_disk,
    "lost disk": _lost_disk,
    "rotting disk": _rotting_disk,
}
KINDS = (*_OF_SOURCE, *_OF_CACHE)


def _may_fail(kind: str) -> bool:
    return kind in _OF_SOURCE.keys() - {"fetcher"}


def _write_pattern(path: Path) -> None:
    """Write each 8 bytes' own offset to them, as the reader expects."""
    with path.open("wb") as file:
        array("Q", range(0, _OBJECT_BYTES, 8)).tofile(file)


def _forget(device: Path) -> None:
    """Drop the device's data from the page cache."""
    with device.open("rb") as file:
        fcntl.ioctl(file, _BLKFLSBUF)


class Readers:
    """Direct and mapped reads, until finish()."""

    def __init__(self, device: Path, *, seed: int, deadline_s: int) -> None:
        self._stack = ExitStack()
        self._reads = {
            mode: self._stack.enter_context(
                verified_reads(
                    device,
                    name=mode,
                    threads=1 if mode == "mmap" else None,
                    depth=_DEPTH,
                    seed=seed,
                    deadline_s=deadline_s * turns + _LATE_S,
                )
            )
            for mode, turns in _KERNEL_READS.items()
        }

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def finish(self, prefix: str = "") -> Result:
        reports = {mode: reads.finish() for mode, reads in self._reads.items()}
        found = {
            f"{prefix}{count}": sum(each[count] for each in reports.values())
            for count in ("reads", "errors", "wrong_bytes", "hung")
        }
        found[f"{prefix}other_errors"] = sum(
            report["errors"] - report["by_error"].get(_EXPECTED[mode], 0)
            for mode, report in reports.items()
        )
        found[f"{prefix}max_s"] = max(each["max_ns"] for each in reports.values()) / 1e9
        return found


def _wait_until_well(device: Path, chance: random.Random) -> float:
    """Return seconds until eight reads in a row have succeeded, infinity for never."""
    start_s, good = time.monotonic(), 0
    with device.open("rb", buffering=0) as file:
        while good < 8:
            if time.monotonic() - start_s > _PATIENCE_S:
                return math.inf
            _forget(device)
            file.seek(chance.randrange(_OBJECT_BYTES // _UNIT_BYTES) * _UNIT_BYTES)
            try:
                file.read(_UNIT_BYTES)
                good += 1
            except OSError:
                good = 0
                time.sleep(0.05)
    return time.monotonic() - start_s


@contextmanager
def _cache_disk(root: Path, *, slow: bool) -> Iterator[Path]:
    """Yield a loop device with an ext4."""
    image, shown = root / "disk", root / "shown"
    shown.mkdir()
    with image.open("wb") as file:
        file.truncate(_DISK_BYTES)
    run([*MAKE["ext4"], image], timeout_s=_TIMEOUT_S)
    with ExitStack() as stack:
        if slow:
            image = stack.enter_context(logged_disk(image, Path("/dev/null"), shown))
        yield stack.enter_context(loop_device(image)).path


@contextmanager
def _device(
    root: Path, disk: Path | None, source: Result | None, *, options: dict[str, Any]
) -> Iterator[tuple[BlockServer, Path | None]]:
    """Yield the server and its cache's directory. ``source`` is mapped; None: it is
    mapped already."""
    with ExitStack() as stack:
        cache = None
        if disk:
            (root / "mounted").mkdir(exist_ok=True)
            errors = ["errors=remount-ro"]
            stack.enter_context(
                mounted(disk, root / "mounted", fs_type="ext4", options=errors)
            )
            cache = root / "mounted/cache"
            cache.mkdir(mode=0o700, exist_ok=True)
        segment = LazySegment(
            offset=0,
            length=_OBJECT_BYTES,
            map=str(root / "map"),
            cache=cache and str(cache),
            deadline_s=options["deadline_s"],
        )
        server = stack.enter_context(
            BlockServer(
                Description(_OBJECT_BYTES, [segment]), front_end=options["front_end"]
            )
        )
        if source:
            server.map_add([source], [Addition(offset=0, length=_OBJECT_BYTES)])
        yield server, cache


def _state(root: Path) -> set[str]:
    """What a round must not leave."""
    found = {f"mount {line}" for line in Path("/proc/self/mounts").open()}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            # The site's own come and go with its faults.
            if process.name().startswith("btrfs-ublk-"):
                found.add(f"process {process.pid}")
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # somebody else's, which has gone
            if backing.read_text().startswith(str(root)):
                found.add(f"loop device {backing.parts[3]}")
    return found


def _choose(first: str, kinds: Sequence[str], chance: random.Random) -> list[str]:
    """Return the round's kind, and half of the time another one."""
    chosen = {first}
    if chance.random() < 0.5:
        chosen.add(chance.choice(kinds))
    if "spoilt" in chosen:  # of another server than the site's
        chosen -= _OF_SOURCE.keys() - {"spoilt", "fetcher"}
    return sorted(chosen)


def run_round(
    where: Site,
    known: Result,
    root: Path,
    faults: list[str],
    *,
    sources: tuple[str, ...],
    duration_s: float,
    seed: int,
    front_end: FrontEndName,
    deadline_s: int,
) -> Result:
    chance = random.Random(seed)
    source = chance.choice([x for x in sources if x != "spoilt"] or ["http"])
    if "spoilt" in faults:
        source = "spoilt"
    cached = bool(_OF_CACHE.keys() & set(faults)) or chance.random() < 0.5
    mirrored = chance.random() < 0.5
    result: Result = {
        "faults": faults,
        "source": source,
        "cached": cached,
        "mirrored": mirrored,
        "may_fail": not mirrored and any(_may_fail(x) for x in faults),
        "deadline_s": deadline_s,
        "seed": seed,
    }
    before = _state(root)
    options = {"deadline_s": deadline_s, "front_end": front_end}
    with ExitStack() as stack:
        stack.enter_context(_measured_stalls(result))
        data = (root.parent / "files/object").read_bytes()
        spoiling = stack.enter_context(SpoilingServer(data, seed=seed))
        mirrors = [where.mirror(source, plain_url=spoiling.url)]
        if mirrored:
            mirrors.append(where.second_mirror())
        disk = None
        if cached:
            slow = "slow disk" in faults
            disk = stack.enter_context(_cache_disk(root, slow=slow))
        with _device(root, disk, {"mirrors": mirrors, **known}, options=options) as it:
            server, cache = it
            device, name = server.device, disk.name if disk else ""
            bed = Bed(where, server, source, spoiling, cache, name, chance, [])
            result["how"] = bed.picked
            with Readers(device, seed=seed, deadline_s=deadline_s) as readers:
                time.sleep(chance.uniform(0, 1))
                with ExitStack() as failing:
                    for kind in faults:
                        fault = {**_OF_SOURCE, **_OF_CACHE}[kind]
                        failing.enter_context(fault(bed))
                    end_s = time.monotonic() + chance.uniform(0.2, 1) * duration_s
                    while time.monotonic() < end_s:
                        time.sleep(0.5)
                        _forget(device)  # or nothing is fetched any more
                healed_s = time.monotonic()
                result["well_s"] = _wait_until_well(device, chance)
                result |= readers.finish()
            # A new read may wait for an old one that hangs until its deadline.
            time.sleep(max(0.0, healed_s + deadline_s - time.monotonic()))
            _forget(device)
            with Readers(device, seed=seed, deadline_s=deadline_s) as readers:
                time.sleep(_HEALED_S)
                result |= readers.finish("healed_")
        with _device(root, disk, None, options=options) as (server, _):
            with Readers(server.device, seed=seed, deadline_s=deadline_s) as readers:
                time.sleep(_AGAIN_S)
                result |= readers.finish("again_")
    result["left"] = sorted(_state(root) - before)
    return result


def problems_of(result: Result) -> list[str]:
    """What went wrong in a round: a byte, an error that was not EIO, that was late, or
    that came where another mirror was well or after the end of the faults."""
    found = [f"{what} is left" for what in result["left"]]
    starved = result["stall_s"] > _STALL_S
    if not starved and result["well_s"] > _HEAL_TIMEOUT_S + result["deadline_s"]:
        found.append(f"reads failed for {result['well_s']:.0f} s after the faults")
    for phase in ("", "healed_", "again_"):
        bad = ["wrong_bytes", "other_errors"]
        if not starved:
            bad.append("hung")
            if phase or not result["may_fail"]:
                bad.append("errors")
        found += [
            f"{result[phase + name]} {phase}{name}"
            for name in bad
            if result[phase + name]
        ]
        if not starved and not result[f"{phase}reads"]:
            found.append(f"no {phase}reads")
    name = " + ".join(result["faults"])
    return [f"{name}, seed {result['seed']}: {one}" for one in found]


def tables(document: Document) -> list[Table]:
    """Make a table with a row for each kind of fault; rounds with two are in both."""
    counts = ("reads", "errors", "wrong_bytes", "hung", "other_errors")
    columns = [campaign.summed(count) for count in counts]
    columns += [
        campaign.timed(f"{name}_s", 1, f"{name} s", 1)
        for name in ("max", "well", "stall")
    ]
    title = "Reads of a lazy device while its source or cache fails"
    note = (
        "Errors are EIO, with mmap SIGBUS, and others. Hung: no answer in "
        "time. The longest times: of a read, until reads succeeded after the "
        "faults, and in which the campaign itself had no CPU."
    )
    rounds, kinds = document["results"], lambda result: result["faults"]
    return [campaign.by_kind(title, rounds, columns, kinds=kinds, note=note)]


@campaign.command(
    "faults",
    click.option(
        "--source",
        "sources",
        type=click.Choice(SOURCES),
        multiple=True,
        default=SOURCES,
        help="Of those that a round chooses from.",
    ),
    click.option(
        "--duration",
        "duration_s",
        type=click.FloatRange(min=0.1),
        default=10.0,
        metavar="SECONDS",
        help="Of the faults, at most.",
    ),
    click.option(
        "--deadline",
        "deadline_s",
        type=click.IntRange(1, 300),
        default=6,
        metavar="SECONDS",
        help="Of reads.",
    ),
    tables=tables,
    needs=(ROOT, LOOP, NGINX, REGISTRY),
    rounds=24,
    kinds=KINDS,
    front_ends=True,
    on_disks=False,
    recorded=("duration_s", "deadline_s"),
)
def command(
    run: Run, sources: tuple[str, ...], duration_s: float, deadline_s: int
) -> None:
    """Verified reads, direct and mapped, of a device whose source or cache fails.

    Fails when a byte was wrong, an error was not EIO, came late, where another mirror
    was well, or after the end of the faults; or when anything is left.
    """
    if "s3" in sources:
        require(WEED)
    root = run.directory
    (root / "files").mkdir()
    _write_pattern(root / "files/object")
    digests = digest_file(root / "files/object", unit_bytes=_UNIT_BYTES)
    known = {"size": _OBJECT_BYTES, "unit": _UNIT_BYTES}
    known |= {"digests": digests.hex(), "root": digests.root}
    where = run.stack.enter_context(site(root, set(sources)))

    def do(result: Result) -> None:
        chance = random.Random(f"{run.seed} {result['number']}")
        faults = _choose(result["kind"], run.kinds, chance)
        with tempdir(parent=root) as place:
            result |= run_round(
                *(where, known, place, faults),
                sources=sources,
                duration_s=duration_s,
                seed=chance.randrange(1 << 31),
                front_end=run.front_end,
                deadline_s=deadline_s,
            )
        result["problems"] += problems_of(result)

    run.do_rounds(lambda _: nullcontext(do), json.dumps)


if __name__ == "__main__":
    run_command(command, name="faults.py")
