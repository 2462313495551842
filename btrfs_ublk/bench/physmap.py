"""How long a large physical map takes to parse and to assert.

``python -m btrfs_ublk.bench.physmap [ROWS]`` makes the map of a fully allocated file in
extents of 256 MiB (the largest that preallocation makes; 307,203 rows are some 75 TiB)
and prints one JSON object per form and layout: rows, parse and assert in seconds, the
best of several turns.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections.abc import Callable

from btrfs_ublk.physmap import PhysicalMap
from btrfs_ublk.physmap.parse import BINARY_MAGIC, TSV_HEADER
from btrfs_ublk.units import GIB, MIB

DEFAULT_ROWS = 307_203
_EXTENT_BYTES = 256 * MIB
_DEVICE_OFFSET = 512 * GIB
_TURNS = 5


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
    best = float("inf")
    for _ in range(_TURNS):
        begin = time.perf_counter()
        what()
        best = min(best, time.perf_counter() - begin)
    return best


def measure(rows: int, *, gap_every: int) -> list[dict[str, object]]:
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

    results: list[dict[str, object]] = []
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
                "parse_s": round(parse_s, 4),
                "assert_s": round(assert_s, 4),
                "total_s": round(parse_s + assert_s, 4),
            }
        )
    return results


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_ROWS
    for gap_every in (rows, max(1, rows * 9 // 10)):
        for result in measure(rows, gap_every=gap_every):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
