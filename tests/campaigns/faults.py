"""Measures what readers of a lazy device see while the server of its data fails, and
after that.

``python tests/campaigns/faults.py --help``
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import campaign
import click
from fault_proxy import FAULTS, Fault, FaultProxy, Faults
from fault_tables import LATE_S, is_good, tables
from verified_reads import verified_reads

from btrfs_ublk.base.capabilities import LOOP, ROOT, require
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.bench import options
from btrfs_ublk.bench.origin import NGINX, origin
from btrfs_ublk.bench.report import Result, make_document, show
from btrfs_ublk.content import Addition, digest_file
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.server import BlockServer, Description, FrontEndName, LazySegment
from btrfs_ublk.units import KIB, MIB

MODES = ("direct", "mmap")
_SHARES = (0.01, 0.1, 1.0)
#: Few, so that reads wait for data, and not for their turn in the kernel.
_DEPTH = 8
#: One, since several would also wait for each other's read-ahead.
_THREADS = 1
_UNIT_BYTES = 64 * KIB
_DELAY_S, _HANG_S = 5.0, 60.0
#: Time for circuit breakers and pending requests; then all reads must succeed.
_HEAL_TIMEOUT_S = 30.0
_HEALED_S = 2.0
#: A mapped read may be four reads of the kernel in turn: read-ahead by madvise() and by
#: the fault, and the page twice, as a fault that has dropped its lock to wait is begun
#: again, whatever the result of the read (filemap_fault(), mm/filemap.c).
_KERNEL_READS = {"direct": 1, "mmap": 4}
_BLKFLSBUF = 0x1261  # linux/fs.h


@dataclass(frozen=True)
class Case:
    """One cell of the matrix. ``share`` is the share of requests that go wrong."""

    fault: Fault
    share: float
    mode: str


@dataclass(frozen=True)
class Bed:
    """A device that gets all its data through the proxy."""

    proxy: FaultProxy
    server: BlockServer


def _write_pattern(path: Path, size_bytes: int) -> None:
    """Write each 8 bytes' own offset to them, as the reader expects."""
    with path.open("wb") as file:
        for start in range(0, size_bytes, MIB):
            words = range(start, min(start + MIB, size_bytes), 8)
            file.write(b"".join(word.to_bytes(8, "little") for word in words))


@contextmanager
def bed(
    parent: Path, *, size_bytes: int, deadline_s: float, front_end: FrontEndName
) -> Iterator[Bed]:
    """Make a bed of an object with digests. Without a cache, each read fetches data."""
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
    """Drop the device's data from the page cache."""
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
    """Return seconds until a read succeeds. Raises BtrfsUblkError."""
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
    """Measure one cell, with faults and then without them."""
    injected = place.proxy.counts.injected.total()
    place.proxy.faults = Faults(
        case.fault, case.share, delay_s=_DELAY_S, hang_s=_HANG_S
    )
    allowed_s = deadline_s * _KERNEL_READS[case.mode] + LATE_S
    try:
        faulty = _read(
            place, case.mode, duration_s=duration_s, deadline_s=allowed_s, seed=1
        )
    finally:
        place.proxy.heal()
    healed_s = time.monotonic()
    well_s = _wait_until_well(place)
    # A new read may wait for an old one that hangs until its deadline.
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


@click.command(context_settings=campaign.SETTINGS)
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
@click.option("--duration-s", type=click.FloatRange(min=0.1), default=6.0)
@click.option("--deadline-s", type=click.IntRange(1, 300), default=2)
@click.option("--size-bytes", type=campaign.COUNT, default=128 * MIB)
@options.front_end_option
@options.memory_directory_option
@campaign.output_option
def command(
    faults: Sequence[str],
    shares: Sequence[float],
    modes: Sequence[str],
    duration_s: float,
    deadline_s: int,
    size_bytes: int,
    front_end: str,
    parent: Path,
    output: Path | None,
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
    document["script"] = "tests/campaigns/faults.py"
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
    campaign.store(document, tables(document), output)
    show(document)
    bad = [
        f"{each['fault']}, {each['share']:.0%}, {each['mode']}"
        for each in document["results"]
        if not is_good(each)
    ]
    campaign.conclude(bad, rounds=len(document["results"]))


if __name__ == "__main__":
    run_command(command, name="faults.py")
