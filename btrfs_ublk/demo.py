"""The demo: from nothing to a writable btrfs with exabytes behind it, and back.

``python -m btrfs_ublk.demo --help``
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, require
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.base.log import setup_logging
from btrfs_ublk.base.process import ProcessIdentity, run
from btrfs_ublk.base.readers import READERS, read_direct
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.btrfs import MIN_WRITABLE_BYTES
from btrfs_ublk.kernel.mountinfo import mounts_at_or_below
from btrfs_ublk.kernel.temporary import loops_below, tempdir
from btrfs_ublk.physmap import PhysicalMap
from btrfs_ublk.seed import DEFAULT_FILENAME, Seed
from btrfs_ublk.server.block_server import BlockServer
from btrfs_ublk.server.description import PatternSegment
from btrfs_ublk.server.names import FrontEndName
from btrfs_ublk.units import BLOCK_BYTES, EIB, MIB, format_size, parse_block_size
from btrfs_ublk.volume.sprout import Sprout
from btrfs_ublk.volume.temporary import Volume, volume

_CLONE_BYTES = 4 * MIB
_MIN_VIRTUAL_BYTES = 64 * MIB
_TAG = b"written on the sprout "
_TWIN = "twin"

console = Console(highlight=False)


@dataclass(frozen=True)
class Clone:
    """A file to clone from the virtual data, and the digest of its content."""

    name: str
    offset: int
    size_bytes: int
    sha256: str


class Steps:
    """Numbered lines: each step, its duration and its result."""

    def __init__(self) -> None:
        self._number = 0
        self._last_s = time.monotonic()
        self.start_s = self._last_s

    def done(self, what: str, result: str) -> None:
        """Print a step that began when the one before it ended."""
        now_s = time.monotonic()
        self._number += 1
        table = Table.grid(padding=(0, 1))
        table.add_column(width=2, justify="right", style="cyan")
        table.add_column(width=25, style="bold")
        table.add_column(width=8, justify="right", style="green")
        table.add_column(overflow="fold")
        duration = f"{now_s - self._last_s:.3f} s"
        table.add_row(str(self._number), what, duration, escape(result))
        console.print(table)
        self._last_s = now_s


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--virtual-data-size",
    default="4E",
    show_default=True,
    metavar="SIZE",
    help="Size of the virtual data, from 64M.",
)
@click.option(
    "--virtual-data-filename",
    default=DEFAULT_FILENAME,
    show_default=True,
    metavar="NAME",
    help="Name of the file that shows it.",
)
@click.option(
    "--rw-fs-size",
    default="1G",
    show_default=True,
    metavar="SIZE",
    help="Size of the (sparse) device that takes what is written.",
)
@click.option(
    "--front-end",
    type=click.Choice(["auto", "ublk", "fuse"]),
    default="auto",
    show_default=True,
    help="How the blocks are served: by a ublk device, or by a loop device on a file "
    "in FUSE; auto: ublk where the kernel has it and survives the server's death.",
)
@click.option("-v", "--verbose", count=True, help="Say what is done; twice: commands.")
def command(
    virtual_data_size: str,
    virtual_data_filename: str,
    rw_fs_size: str,
    front_end: FrontEndName,
    verbose: int,
) -> None:
    """Make a btrfs seed with exabytes of virtual data, serve its blocks, sprout it,
    clone files from it, read them back and check them, write to them, and take
    everything down again. Needs root and a kernel with btrfs and ublk or FUSE.
    """
    setup_logging(verbosity=verbose)
    virtual_bytes = parse_block_size(virtual_data_size, what="--virtual-data-size")
    writable_bytes = parse_block_size(rw_fs_size, what="--rw-fs-size")
    _check_range("--virtual-data-size", virtual_bytes, _MIN_VIRTUAL_BYTES, 7 * EIB)
    _check_range("--rw-fs-size", writable_bytes, MIN_WRITABLE_BYTES, EIB)
    require(ROOT, BTRFS, LOOP)
    show(virtual_bytes, virtual_data_filename, writable_bytes, front_end)


def show(
    virtual_bytes: int, filename: str, writable_bytes: int, front_end: FrontEndName
) -> None:
    """Run the demo. Raises BtrfsUblkError for a check that fails."""
    console.print(
        f"[bold]btrfs-ublk[/bold]: {format_size(virtual_bytes)} of virtual data, "
        f"Linux {os.uname().release}, {os.cpu_count()} CPUs\n"
    )
    clones = _clones(virtual_bytes, taken={filename})
    before = process_ledger().entries()
    steps = Steps()
    with tempdir() as directory:
        target = directory / "mnt"
        target.mkdir()
        with volume(
            target,
            [PatternSegment(offset=0, length=virtual_bytes)],
            virtual_data_size=virtual_bytes,
            virtual_data_filename=filename,
            writable_bytes=writable_bytes,
            parent=directory,
            front_end=front_end,
            observe=lambda stage, thing: _tell(steps, thing),
        ) as made:
            _make_clones(steps, made, clones)
            _read_back(steps, made, clones)
            _overwrite(steps, made, clones[0])
            costs = _costs(made)
            server = ProcessIdentity.of(made.server.pid)
    steps.done("take it down", "unmounted, and its devices are gone")
    with tempdir() as second:
        image_costs = _second_act(steps, second, front_end)
    left = [str(entry) for entry in process_ledger().entries() if entry not in before]
    left += _things_in(directory) + _things_in(second)
    left += [f"server process {server.pid}"] if server.is_alive() else []
    if left:
        raise BtrfsUblkError(f"left behind: {', '.join(left)}")
    steps.done("look for leftovers", "nothing is left")
    console.print(costs)
    if image_costs is not None:
        console.print(image_costs)
    total_s = time.monotonic() - steps.start_s
    console.print(f"\n[bold green]All checks passed[/bold green] in {total_s:.1f} s.")


def _second_act(steps: Steps, directory: Path, front_end: FrontEndName) -> Table | None:
    """Show an image, where there is a registry to push it to."""
    # NB: imports of registries take long.
    from btrfs_ublk.demo_image import show_image
    from btrfs_ublk.testing.registry import REGISTRY

    console.print()
    if reason := REGISTRY.probe():
        console.print(f"No image is shown: {REGISTRY.name}: {reason}; {REGISTRY.hint}")
        return None
    return show_image(steps.done, directory, front_end)


def _check_range(option: str, size_bytes: int, least: int, most: int) -> None:
    if not least <= size_bytes <= most:
        raise UsageError(
            f"{option} {format_size(size_bytes)} is out of the demo's range",
            hint=f"give {format_size(least)} to {format_size(most)}",
        )


def _tell(steps: Steps, thing: object) -> None:
    if isinstance(thing, Seed):
        steps.done(
            "format the seed",
            f"{format_size(thing.virtual_data.size)} in {thing.chunks} chunks; "
            f"{format_size(_allocated_bytes(thing.path))} on disk",
        )
    elif isinstance(thing, BlockServer):
        steps.done(
            "serve its blocks",
            f"{thing.device} ({thing.front_end}), "
            f"{format_size(thing.description.size)}, "
            f"{len(thing.description.segments)} segments",
        )
    elif isinstance(thing, PhysicalMap):
        steps.done(
            "mount it, check the map", f"{len(thing)} extents, each where it is served"
        )
    elif isinstance(thing, Sprout):
        steps.done(
            "sprout it: add a disk",
            f"{thing.writable.path}, {format_size(thing.writable.size_bytes)}; "
            "writable now",
        )


def _free_name(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "-clone"
    return name


def _clones(virtual_bytes: int, *, taken: set[str]) -> list[Clone]:
    """Plan clones of the start, the middle and the end of the virtual data, with names
    that are not taken.
    """
    taken = taken | {_TWIN}
    size_bytes = min(_CLONE_BYTES, virtual_bytes // 8 // BLOCK_BYTES * BLOCK_BYTES)
    middle = virtual_bytes // 2 // BLOCK_BYTES * BLOCK_BYTES
    places = {"start": 0, "middle": middle, "end": virtual_bytes - size_bytes}
    clones = []
    for place, offset in places.items():
        name = _free_name(place, taken)
        taken.add(name)
        numbers = PatternSegment(offset=offset, length=size_bytes)
        sha256 = _sha256(numbers.content(offset, size_bytes))
        clones.append(Clone(name, offset, size_bytes, sha256))
    return clones


def _make_clones(steps: Steps, made: Volume, clones: list[Clone]) -> None:
    for clone in clones:
        made.clone(clone.name, offset=clone.offset, size_bytes=clone.size_bytes)
    _sync(made)
    total = sum(clone.size_bytes for clone in clones)
    what = f"{len(clones)} files of {format_size(total)}"
    steps.done("clone ranges of it", f"{what}; no data moved")


def _read_back(steps: Steps, made: Volume, clones: list[Clone]) -> None:
    for how, read in READERS.items():
        for clone in clones:
            sha256 = _sha256(read(made.target / clone.name, 0, clone.size_bytes))
            if sha256 != clone.sha256:
                raise BtrfsUblkError(
                    f"{clone.name}, read {how}, is not what was served: "
                    f"SHA-256 {sha256}, not {clone.sha256}"
                )
        total = sum(clone.size_bytes for clone in clones)
        steps.done(f"read them back, {how}", f"{format_size(total)}, hashes agree")


def _overwrite(steps: Steps, made: Volume, clone: Clone) -> None:
    """Change a few blocks of one clone; check that the rest, and its twin, stay."""
    name = _free_name(_TWIN, os.listdir(made.target))
    twin = made.clone(name, offset=clone.offset, size_bytes=clone.size_bytes)
    path = made.target / clone.name
    expected = bytearray(read_direct(path, 0, clone.size_bytes))
    last = clone.size_bytes // BLOCK_BYTES - 1
    blocks = sorted({0, last // 2, last})
    with path.open("r+b", buffering=0) as file:
        for block in blocks:
            new = (_TAG * BLOCK_BYTES)[:BLOCK_BYTES]
            os.pwrite(file.fileno(), new, block * BLOCK_BYTES)
            expected[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = new
        os.fsync(file.fileno())
    if read_direct(path, 0, clone.size_bytes) != expected:
        raise BtrfsUblkError(f"{path} does not read as it was written")
    if _sha256(read_direct(twin, 0, clone.size_bytes)) != clone.sha256:
        raise BtrfsUblkError(f"a write to {path} changed {twin}")
    steps.done(
        "overwrite some blocks",
        f"{len(blocks)} blocks of '{clone.name}'; its twin stays",
    )


def _costs(made: Volume) -> Table:
    _sync(made)
    stats = made.server.stats()
    table = Table(
        title="\nWhat it cost", title_justify="left", box=None, pad_edge=False
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    virtual_bytes = made.seed.virtual_data.size
    writable = made.sprout.writable.backing_file
    table.add_row("virtual data", format_size(virtual_bytes))
    table.add_row("on disk: seed", format_size(_allocated_bytes(made.seed.path)))
    table.add_row("on disk: sprout", format_size(_allocated_bytes(writable)))
    table.add_row("server's memory", format_size(_resident_bytes(made.server.pid)))
    for name, kind in stats.kinds.items():
        if kind.reads:
            p99_ms = kind.latency.reads.percentile_ns(99) / 1e6
            table.add_row(
                f"read from {name} segments",
                format_size(kind.read_bytes),
                f"in {kind.reads} requests, p99 {p99_ms:.3f} ms",
            )
    table.add_row("read errors", str(stats.errors))
    return table


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _allocated_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512  # stat(2): st_blocks counts 512-byte units


def _sha256(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def _sync(made: Volume) -> None:
    # Only this file system: others may be large and slow.
    run(["sync", "--file-system", made.target], timeout_s=60)


def _things_in(directory: Path) -> list[str]:
    """List our leftovers by path, since others may use this machine too."""
    left = [f"mount on {mount.target}" for mount in mounts_at_or_below(directory)]
    left += [f"{device} on {file}" for device, file in loops_below(directory)]
    return left + ([str(directory)] if directory.exists() else [])


if __name__ == "__main__":
    run_command(command, name="btrfs_ublk.demo")
