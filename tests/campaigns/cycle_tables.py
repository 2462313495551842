"""Tables of device_cycles.py: how long devices took that were added and removed
many times, and whether anything grew.
"""

from __future__ import annotations

from collections.abc import Sequence

from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.stats import grouped
from btrfs_ublk.bench.study import Column, listing
from btrfs_ublk.units import KIB

#: The names of what is counted, as in results.
COUNTED = ("slab_bytes", "open_files", "servers", "devices")


def tables(document: Document) -> list[Table]:
    """Make tables of cycles, of rounds with many devices at once, and of growth."""
    groups = grouped(document["results"], lambda result: result["what"])
    made = []
    if "cycles" in groups:
        made.append(_cycles_table(groups["cycles"]))
    if "volume cycles" in groups:
        made.append(_volumes_table(groups["volume cycles"]))
    if "at once" in groups:
        made.append(_rounds_table(groups["at once"]))
    grown = [
        (result["what"], text)
        for result in document["results"]
        for text in result.get("growth", {}).values()
    ]
    if grown:
        made.append(Table("What grew", ("in", "what"), grown, left=2))
    return made


def _count(name: str, scale: float = 1.0) -> Column:
    head = name.replace("_", " ").replace(" bytes", " KiB" if scale < 1 else " bytes")
    return Column(head, lambda its: float(its[0]["counts"][name]), 0, scale)


def _time(head: str, part: str, quantile: str = "p50") -> Column:
    def of(its: Sequence[Result]) -> float:
        return float(its[0]["times"][part][f"{quantile}_us"])

    return Column(head, of, 1, 1e-3)


_COUNTS = (_count("slab_bytes", 1 / KIB), *map(_count, COUNTED[1:]))


def _cycles_table(results: list[Result]) -> Table:
    caches = results[-1].get("caches", {})
    note = ", ".join(f"{name} {by / KIB:,.0f} KiB" for name, by in caches.items())
    return listing(
        "One device after another",
        results,
        (
            Column("cycles", "cycles"),
            *(_time("add ms", "add"), _time("p99", "add", "p99")),
            _time("read ms", "read"),
            *(_time("remove ms", "remove"), _time("p99", "remove", "p99")),
            *_COUNTS,
        ),
        note="Medians of the cycles since the row above. Slab: what the kernel cannot "
        f"drop. Caches that grew most since the warm-up: {note or 'none'}.",
    )


def _volumes_table(results: list[Result]) -> Table:
    names = results[0]["counts"]
    return listing(
        "Volumes up and down",
        results,
        (
            Column("cycles", "cycles"),
            *(_time("up ms", "add"), _time("p99", "add", "p99")),
            *(_time("down ms", "remove"), _time("p99", "remove", "p99")),
            *(_count(x, 1 / KIB if x.endswith("_bytes") else 1.0) for x in names),
        ),
        note="Medians of the cycles since the row above, of several volumes at a time; "
        "counted while all were down.",
    )


def _rounds_table(results: list[Result]) -> Table:
    seconds = (Column("add s", "add_s", 2), Column("remove s", "remove_s", 2))
    return listing(
        f"{results[0]['devices_at_once']} devices at once",
        results,
        (Column("round", "round"), *seconds, *_COUNTS),
        note="Until all are there, and until all are gone; counted after that.",
    )
