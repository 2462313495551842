"""What readers of a lazy device see when its server of data fails, and when it is well
again.

``python -m btrfs_ublk.bench.faults --help``
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.fault_proxy import FAULTS, Fault, FaultProxy, Faults
from btrfs_ublk.bench.origin import NGINX, origin
from btrfs_ublk.bench.report import (
    Document,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.bench.verified_reads import verified_reads
from btrfs_ublk.capabilities import LOOP, ROOT, require
from btrfs_ublk.entry import json_option, run_command
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.lazy import Addition, digest_file
from btrfs_ublk.resources.tempdir import tempdir
from btrfs_ublk.server import BlockServer, Description, FrontEndName, LazySegment
from btrfs_ublk.units import KIB, MIB

MODES = ("direct", "mmap")
_SHARES = (0.01, 0.1, 1.0)
#: Few, so that what waits, waits for data, and not for its turn in the kernel.
_DEPTH = 8
#: One, since several wait for each other's read-ahead as well.
_THREADS = 1
_UNIT_BYTES = 64 * KIB
_DELAY_S, _HANG_S = 5.0, 60.0
#: Circuit breakers and what a dead server has to answer; then all has to be well.
_HEAL_TIMEOUT_S = 30.0
_HEALED_S = 2.0
#: A mapped read may be four of the kernel's, one after the other: what madvise() and
#: the fault read ahead, and twice the page: a fault that has let go of its lock to wait
#: is begun anew, whatever came of it (filemap_fault(), mm/filemap.c).
_KERNEL_READS = {"direct": 1, "mmap": 4}
#: How much later than its deadline a read may fail.
_LATE_S = 1
_BLKFLSBUF = 0x1261  # linux/fs.h


@dataclass(frozen=True)
class Case:
    """One cell of the matrix. ``share`` is that of the requests that go wrong."""

    fault: Fault
    share: float
    mode: str


@dataclass(frozen=True)
class Bed:
    """A device all of whose data come through the proxy."""

    proxy: FaultProxy
    server: BlockServer


def _write_pattern(path: Path, size_bytes: int) -> None:
    """Each 8 bytes hold their own offset, as the reader expects it."""
    with path.open("wb") as file:
        for start in range(0, size_bytes, MIB):
            words = range(start, min(start + MIB, size_bytes), 8)
            file.write(b"".join(word.to_bytes(8, "little") for word in words))


@contextmanager
def bed(
    parent: Path, *, size_bytes: int, deadline_s: float, front_end: FrontEndName
) -> Iterator[Bed]:
    """An object with digests, and no cache: each read asks for its data."""
    with ExitStack() as stack:
        root = stack.enter_context(tempdir(parent=parent))
        data = root / "served"
        data.mkdir()
        _write_pattern(data / "object", size_bytes)
        digests = digest_file(data / "object", unit_bytes=_UNIT_BYTES)
        upstream = stack.enter_context(origin(root, data))
        proxy = stack.enter_context(FaultProxy(upstream))
        segment = LazySegment(
            offset=0,
            length=size_bytes,
            map=str(root / "map"),
            deadline_s=deadline_s,
        )
        server = stack.enter_context(
            BlockServer(Description(size_bytes, [segment]), front_end=front_end)
        )
        source = {
            "kind": "http",
            "url": proxy.url("/object"),
            "proxy": "none",
            "size": size_bytes,
            "unit": _UNIT_BYTES,
            "digests": digests.hex(),
            "root": digests.root,
        }
        server.map_add([source], [Addition(offset=0, length=size_bytes)])
        yield Bed(proxy, server)


def _forget(device: Path) -> None:
    """What the page cache has of it."""
    with device.open("rb") as file:
        fcntl.ioctl(file, _BLKFLSBUF)


def _read(
    place: Bed, mode: str, *, duration_s: float, deadline_s: int, seed: int
) -> dict[str, Any]:
    _forget(place.server.device)
    threads = _THREADS if mode == "mmap" else None
    with verified_reads(
        place.server.device,
        threads=threads,
        depth=_DEPTH,
        seed=seed,
        deadline_s=deadline_s,
    ) as reads:
        time.sleep(duration_s)
        return reads.finish()


def _wait_until_well(place: Bed) -> float:
    """Seconds until the first read without an error. Raises BtrfsUblkError."""
    start = time.monotonic()
    while time.monotonic() - start < _HEAL_TIMEOUT_S:
        _forget(place.server.device)
        try:
            with place.server.device.open("rb", buffering=0) as file:
                file.read(_UNIT_BYTES)
            return time.monotonic() - start
        except OSError:
            time.sleep(0.05)
    raise BtrfsUblkError(
        f"no read without an error {_HEAL_TIMEOUT_S:g} s after all was well again"
    )


def measure(place: Bed, case: Case, *, duration_s: float, deadline_s: int) -> Result:
    """One cell: faults, then none."""
    injected = place.proxy.counts.injected.total()
    place.proxy.faults = Faults(
        case.fault, case.share, delay_s=_DELAY_S, hang_s=_HANG_S
    )
    allowed_s = deadline_s * _KERNEL_READS[case.mode] + _LATE_S
    try:
        faulty = _read(
            place, case.mode, duration_s=duration_s, deadline_s=allowed_s, seed=1
        )
    finally:
        place.proxy.heal()
    healed_s = time.monotonic()
    well_s = _wait_until_well(place)
    # What hangs from before may be what a new read waits for, until its deadline.
    time.sleep(max(0.0, healed_s + deadline_s - time.monotonic()))
    healed = _read(place, case.mode, duration_s=_HEALED_S, deadline_s=allowed_s, seed=2)
    expected = {"EIO"} if case.mode == "direct" else {"SIGBUS"}
    return {
        "fault": case.fault,
        "share": case.share,
        "mode": case.mode,
        "injected": place.proxy.counts.injected.total() - injected,
        "reads": faulty["reads"],
        "errors": faulty["errors"],
        "other_errors": sum(
            count for name, count in faulty["by_error"].items() if name not in expected
        ),
        "wrong_bytes": faulty["wrong_bytes"] + healed["wrong_bytes"],
        "late": faulty["hung"],
        "max_s": faulty["max_ns"] / 1e9,
        "well_s": well_s,
        "healed_reads": healed["reads"],
        "healed_errors": healed["errors"] + healed["hung"],
    }


def is_good(result: Result) -> bool:
    """No wrong byte, no error but EIO (SIGBUS, mapped), in time, none afterwards."""
    bad = ("wrong_bytes", "other_errors", "late", "healed_errors")
    return not any(result[name] for name in bad) and result["healed_reads"] > 0


def tables(document: Document) -> list[Table]:
    """One row per cell."""
    parameters = document["parameters"]
    rows = [
        (
            result["fault"],
            result["mode"],
            f"{result['share']:.0%}",
            number(result["injected"]),
            number(result["reads"]),
            number(result["errors"]),
            number(result["other_errors"]),
            number(result["wrong_bytes"]),
            number(result["late"]),
            number(result["max_s"], 2),
            number(result["well_s"], 2),
            number(result["healed_reads"]),
            number(result["healed_errors"]),
            "yes" if is_good(result) else "NO",
        )
        for result in document["results"]
    ]
    columns = (
        *("fault", "read by", "share", "injected", "reads", "EIO", "others"),
        *("wrong bytes", "late", "longest s", "well s", "reads", "errors", "good"),
    )
    return [
        Table(
            "Reads of a lazy device while its server fails, and afterwards",
            columns,
            rows,
            2,
            f"A read has {parameters['deadline_s']} s. EIO: with mmap, SIGBUS. Late: "
            f"no answer {_LATE_S} s after that; a mapped read may be four of "
            "the kernel's, one after the other, and has four times as long. Well: "
            "until the first good read after the end of the faults; reads and errors "
            "behind it are of those that begin when what hung has had its deadline. "
            "Longest: of those that were answered.",
        )
    ]


@click.command(context_settings=options.SETTINGS)
@click.option(
    "--fault", "faults", type=click.Choice(FAULTS), multiple=True, default=FAULTS
)
@click.option(
    "--share",
    "shares",
    type=click.FloatRange(0, 1),
    multiple=True,
    default=_SHARES,
    help="Of the requests that go wrong.",
)
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, default=MODES)
@click.option("--duration", "duration_s", type=click.FloatRange(min=0.1), default=6.0)
@click.option(
    "--deadline", "deadline_s", type=click.IntRange(1, 300), default=2, help="Seconds."
)
@options.size_option("128M")
@options.front_end_option
@options.memory_directory_option
@json_option
def command(
    faults: Sequence[str],
    shares: Sequence[float],
    modes: Sequence[str],
    duration_s: float,
    deadline_s: int,
    size_bytes: int,
    front_end: str,
    parent: Path,
    as_json: bool,
) -> None:
    """Verified reads, direct and mapped, of a device whose data come from a web server
    through a proxy that spoils a share of the answers.

    Fails when a byte was wrong, an error was not EIO or came late, or there was one
    after the end of the faults.
    """
    require(ROOT, LOOP, NGINX)
    parameters = {
        "deadline_s": deadline_s,
        "duration_s": duration_s,
        "size_bytes": size_bytes,
    }
    document = make_document(
        "faults", parameters=parameters, directory=parent, results=[]
    )
    with bed(
        parent,
        size_bytes=size_bytes,
        deadline_s=deadline_s,
        front_end=cast(FrontEndName, front_end),
    ) as place:
        for fault in faults:
            for share in shares:
                for mode in modes:
                    document["results"].append(
                        measure(
                            place,
                            Case(cast(Fault, fault), share, mode),
                            duration_s=duration_s,
                            deadline_s=deadline_s,
                        )
                    )
    finish(document, as_json=as_json)
    bad = [result for result in document["results"] if not is_good(result)]
    if bad:
        raise BtrfsUblkError(f"{len(bad)} of {len(document['results'])} are not good")


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.faults")
