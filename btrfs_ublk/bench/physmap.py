"""How long a large physical map takes to parse and to assert.

The map is that of a fully allocated file in extents of 256 MiB, the largest that
preallocation makes; 307,203 rows are some 75 TiB.

``python -m btrfs_ublk.bench.physmap --help``
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.environment import wait_until_quiet
from btrfs_ublk.bench.report import (
    Document,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.bench.stats import grouped, median_of
from btrfs_ublk.entry import run_command
from btrfs_ublk.physmap import PhysicalMap
from btrfs_ublk.physmap.parse import BINARY_MAGIC, TSV_HEADER
from btrfs_ublk.units import GIB, MIB

DEFAULT_ROWS = 307_203
_EXTENT_BYTES = 256 * MIB
_DEVICE_OFFSET = 512 * GIB


def numbers(rows: int, *, gap_every: int) -> array[int]:
    """The cells of a map, row by row; a gap on the device after every so many rows."""
    cells = array("Q")
    size = _EXTENT_BYTES
    for row in range(rows):
        where = _DEVICE_OFFSET + (row + row // gap_every) * size
        cells.extend((row * size, size, 0, 1, size, where, size, 1, where))
    return cells


def tsv(cells: array[int]) -> str:
    """The same in the helper's text form."""
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
    """One result for each form; parsed and asserted as a seed's map is before use."""
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

    results: list[Result] = []
    assert_s = _time(check)
    for form, parse_s in (
        ("binary", _time(lambda: PhysicalMap.parse_binary(data))),
        ("tsv", _time(lambda: PhysicalMap.parse_tsv(text))),
    ):
        results.append(
            {
                "form": form,
                "layout": "one run" if gap_every >= rows else "with gaps",
                "rows": rows,
                "load": os.getloadavg()[0],
                "parse_s": parse_s,
                "assert_s": assert_s,
                "total_s": parse_s + assert_s,
            }
        )
    return results


def tables(document: Document) -> list[Table]:
    """Milliseconds: medians, and the best."""
    groups = grouped(
        document["results"], lambda result: (result["form"], result["layout"])
    )
    rows = [
        (
            *names,
            number(results[0]["rows"]),
            str(len(results)),
            *(
                f"{number(median_of(results, name) * 1e3, 1)} "
                f"({number(min(result[name] for result in results) * 1e3, 1)})"
                for name in ("parse_s", "assert_s", "total_s")
            ),
            number(median_of(results, "load"), 1),
        )
        for names, results in groups.items()
    ]
    columns = ("form", "layout", "rows", "turns", "parse", "assert", "both", "load")
    return [Table("Physical maps: milliseconds, median (best)", columns, rows, 2)]


@click.command(context_settings=options.SETTINGS)
@click.option("--rows", type=options.COUNT, default=DEFAULT_ROWS)
@options.common_options(repeats=11)
def command(
    rows: int, repeats: int, parent: Path, patience_s: float, as_json: bool
) -> None:
    """Parse and assert large physical maps, which are made up: nothing is mounted."""
    document = make_document("physmap", parameters={}, directory=parent, results=[])
    for _turn in range(repeats):
        for gap_every in (rows, max(1, rows * 9 // 10)):
            wait_until_quiet(timeout_s=patience_s)
            document["results"] += measure(rows, gap_every=gap_every)
    finish(document, as_json=as_json)


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.physmap")
