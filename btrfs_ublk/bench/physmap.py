"""How long a large physical map takes to parse and to assert.

The map is of a fully allocated file with extents of 256 MiB, the largest that
preallocation makes; 307,203 rows are about 75 TiB.

``python -m btrfs_ublk.bench.physmap --help``
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Callable

import click

from btrfs_ublk.base.entry import run_command
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Result, Table, number
from btrfs_ublk.bench.study import LOAD, TURNS, Column, Run, study, table
from btrfs_ublk.physmap import PhysicalMap
from btrfs_ublk.physmap.parse import BINARY_MAGIC, TSV_HEADER
from btrfs_ublk.units import GIB, MIB

_EXTENT_BYTES = 256 * MIB
_DEVICE_OFFSET = 512 * GIB


def numbers(rows: int, *, gap_every: int) -> array[int]:
    """Return a map's cells by row, with a gap after every ``gap_every`` rows."""
    cells = array("Q")
    size = _EXTENT_BYTES
    for row in range(rows):
        where = _DEVICE_OFFSET + (row + row // gap_every) * size
        cells.extend((row * size, size, 0, 1, size, where, size, 1, where))
    return cells


def tsv(cells: array[int]) -> str:
    """Return the map in the helper's text form."""
    lines = [TSV_HEADER]
    for at in range(0, len(cells), 9):
        row = list(map(str, cells[at : at + 9]))
        row[3] = "regular"
        lines.append("\t".join(row))
    return "\n".join(lines) + "\n"


def _time(what: Callable[[], object]) -> float:
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


def measure(rows: int, *, gap_every: int) -> list[Result]:
    """Measure each form; parsed and asserted as a seed's map is before use."""
    cells = numbers(rows, gap_every=gap_every)
    text = tsv(cells)
    if sys.byteorder == "big":
        cells.byteswap()
    data = BINARY_MAGIC + cells.tobytes()
    physical_map = PhysicalMap.parse_binary(data)

    def check() -> None:
        physical_map.assert_virtual_data(
            size_bytes=rows * _EXTENT_BYTES, whole=gap_every >= rows
        )

    assert_s = _time(check)
    times = {
        "binary": _time(lambda: PhysicalMap.parse_binary(data)),
        "tsv": _time(lambda: PhysicalMap.parse_tsv(text)),
    }
    return [
        {
            "form": form,
            "layout": "one run" if gap_every >= rows else "with gaps",
            "rows": rows,
            "load": os.getloadavg()[0],
            "parse_s": parse_s,
            "assert_s": assert_s,
            "total_s": parse_s + assert_s,
        }
        for form, parse_s in times.items()
    ]


def tables(document: Document) -> list[Table]:
    """Make a table of milliseconds: medians, and the best."""
    times = {"parse": "parse_s", "assert": "assert_s", "both": "total_s"}
    return [
        table(
            "Physical maps: milliseconds, median (best)",
            document["results"],
            {"form": lambda x: str(x["form"]), "layout": lambda x: str(x["layout"])},
            [
                Column("rows", lambda turns: number(turns[0]["rows"])),
                TURNS,
                *(Column(head, key, 1, 1e3, best=True) for head, key in times.items()),
                LOAD,
            ],
            left=2,
        )
    ]


@study(
    "physmap",
    click.option("--rows", type=options.COUNT, default=307_203),
    repeats=11,
)
def command(run: Run, rows: int) -> None:
    """Parse and assert large physical maps, which are made up: nothing is mounted."""
    for _ in run.turns():
        for gap_every in (rows, max(1, rows * 9 // 10)):
            run.wait_until_quiet()
            run.add(*measure(rows, gap_every=gap_every))


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.physmap")
