"""Tables of faults.py: what readers of a lazy device saw while its data server
failed, and when they were well again.
"""

from __future__ import annotations

from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.study import Column, listing

#: The longest time after its deadline at which a read may fail.
LATE_S = 1


def is_good(result: Result) -> bool:
    """Whether no byte was wrong, and errors were EIO (SIGBUS), in time, none later."""
    bad = ("wrong_bytes", "other_errors", "late", "healed_errors")
    return not any(result[name] for name in bad) and result["healed_reads"] > 0


_COLUMNS = (
    Column("fault", "fault"),
    Column("read by", "mode"),
    Column("share", lambda cell: f"{cell[0]['share']:.0%}"),
    Column("injected", "injected"),
    Column("reads", "reads"),
    Column("EIO", "errors"),
    Column("others", "other_errors"),
    Column("wrong bytes", "wrong_bytes"),
    Column("late", "late"),
    Column("longest s", "max_s", 2),
    Column("well s", "well_s", 2),
    Column("reads", "healed_reads"),
    Column("errors", "healed_errors"),
    Column("good", lambda cell: "yes" if is_good(cell[0]) else "NO"),
)


_NOTE = (
    "A read has {deadline_s} s. EIO: with mmap, SIGBUS. Late: no answer "
    f"{LATE_S} s after that; a mapped read may be four of the kernel's, one after the "
    "other, and has four times as long. Well: until the first good read after the end "
    "of the faults; reads and errors behind it are of those that begin when what hung "
    "has had its deadline. Longest: of those that were answered."
)


def tables(document: Document) -> list[Table]:
    """Make a table with one row per cell."""
    return [
        listing(
            "Reads of a lazy device while its server fails, and afterwards",
            document["results"],
            _COLUMNS,
            left=2,
            note=_NOTE.format(deadline_s=document["parameters"]["deadline_s"]),
        )
    ]
