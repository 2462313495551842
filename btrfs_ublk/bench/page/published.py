"""What others have published of the workloads that suites repeat: their hardware, so
ratios may be compared, and figures may not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from btrfs_ublk.bench.report import Table


@dataclass(frozen=True)
class Published:
    """One table, where it is from, and on what it was measured."""

    source: str
    hardware: str
    table: Table


#: Of a peer to a baseline: btrfs-ublk of 2023 (ublk with memset), btrfs on brd.
RATIOS = {
    ("ublk-clone", "btrfs-brd", "randread-uring"): 215 / 175,
    ("ublk-clone", "btrfs-brd", "randread-psync"): 77 / 107,
    ("ublk-clone", "btrfs-brd", "randread-uring-j12"): 680 / 680,
    ("ublk-clone", "btrfs-brd", "randread-psync-j12"): 345 / 420,
}

#: Best IOPS of the matrix of 2023, by engine and jobs; ublk with memset. Those of mmap
#: are warm: from the page cache.
MATRIX_BESTS: dict[str, dict[int, float]] = {
    "io_uring": {1: 224e3, 2: 361e3, 6: 601e3, 12: 643e3},
    "psync": {1: 78e3, 2: 126e3, 6: 246e3, 12: 311e3},
    "mmap": {1: 151e3, 2: 714e3, 6: 2.5e6, 12: 3.0e6},
}
MATRIX_HARDWARE = "i7-9750H, 12 threads, Linux 6.0.18, ublk"


def published_ratio(
    parameters: Mapping[str, Any],
    peer: str,
    baseline: str,
    workload: str,
    measure: str,
) -> float | None:
    """That of a document with such ``parameters``, or one that is known here."""
    figures = (parameters.get("published") or {}).get("figures", [])
    settings: dict[str, dict[str, float]] = {}
    for figure in figures:
        if (figure["workload"], figure["measure"]) == (workload, measure):
            values = settings.setdefault(str(figure.get("setting", "")), {})
            values.setdefault(str(figure["like"]), float(figure["value"]))
    for values in settings.values():
        if values.get(baseline) and peer in values:
            return values[peer] / values[baseline]
    # Whatever the depth: the original does not say it of these figures.
    parts = [part for part in workload.split("-") if not _is_depth(part)]
    return RATIOS.get((peer, baseline, "-".join(parts)))


def _is_depth(part: str) -> bool:
    return part[:1] == "d" and part[1:].isdigit()


def _matrix(head: Sequence[str], text: str) -> tuple[list[str], list[list[str]]]:
    """Of lines of words; "_" in a word is a space."""
    rows = [
        [word.replace("_", " ") for word in line.split()]
        for line in text.strip().splitlines()
    ]
    return list(head), rows


def _table(
    title: str, head: Sequence[str], text: str, *, left: int = 1, note: str = ""
) -> Table:
    columns, rows = _matrix(head, text)
    return Table(title, columns, rows, left, note)


_RANDREAD = Published(
    "btrfs-ublk, 2023",
    "i7-9750H, 12 threads, Linux 6.0.18",
    _table(
        "4 KiB random reads: thousand IOPS (cores)",
        ["path", "1 io_uring", "12 io_uring", "1 psync", "12 psync"],
        """
        btrfs-ublk,_memset 215_(1.8) 680_(11.5) 77_(0.8) 345_(7.3)
        btrfs_on_brd 175 680 107 420
        ratio 1.23 1.00 0.72 0.82
        """,
        note="Columns: readers and engine.",
    ),
)
_MATRIX = Published(
    "btrfs-ublk, 2023",
    MATRIX_HARDWARE,
    Table(
        "4 KiB random reads: thousand IOPS of the best configuration",
        ["engine", "1 job", "2 jobs", "6 jobs", "12 jobs"],
        [
            [engine, *(f"{value / 1e3:,.0f}" for value in figures.values())]
            for engine, figures in MATRIX_BESTS.items()
        ],
        1,
        "mmap: warm, from the page cache. Kind of seed and size of the virtual data: "
        "2 % of a difference at most.",
    ),
)
#: By the suites that repeat them; "matrix" is no suite. Documents of other suites have
#: such figures themselves.
PUBLISHED = {"brd": _RANDREAD, "matrix": _MATRIX}
