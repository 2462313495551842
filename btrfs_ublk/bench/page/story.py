"""The few plots at the top of a page: speed, latency, cost.

Each is of one file, measured natively on an idle machine. A plot for which no such file
is given is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from btrfs_ublk.bench.fetching import DEFAULT, GET, OURS
from btrfs_ublk.bench.page.comparisons import (
    contests,
    is_ours,
    measured_line,
    values_plot,
)
from btrfs_ublk.bench.page.inputs import Data, DocumentData, labels_of
from btrfs_ublk.bench.page.measures import Measure, ratio_text
from btrfs_ublk.bench.page.plots import Line, Plot
from btrfs_ublk.bench.stats import grouped
from btrfs_ublk.units import MIB, format_size

_SECONDS, _BYTES = Measure("seconds", "Seconds", "s"), Measure("bytes", "Bytes", "B")


def stories(data: Data) -> Iterator[tuple[int, Plot]]:
    """Yield the plots of a file, each with its place on the page."""
    if isinstance(data, DocumentData) and labels_of(data) == ["native"]:
        suite = data.document["parameters"].get("suite")
        for place, (benchmark, of_suite, tell) in enumerate(_TELLERS):
            if (data.benchmark, suite) == (benchmark, of_suite):
                yield from ((place, plot) for plot in tell(data))


def _reads(data: DocumentData) -> Iterator[Plot]:
    """Plot cached reads through btrfs: ours and the kernel's own devices."""
    for each in contests(data):
        if each.workload == "randread-psync" and "fuse-clone" in each.peers:
            title = "Warm 4 KiB reads of a file, one at a time"
            yield replace(values_plot(each), title=title)


def _cold_reads(data: DocumentData) -> Iterator[Plot]:
    """Plot verified reads from a server on loopback, beside bare requests."""
    found = [x for x in data.document["results"] if x.get("what") == "random"]
    lines = []
    for unit, its in sorted(grouped(found, lambda x: int(x["unit"])).items()):
        for subject, turns in grouped(its, lambda x: str(x["subject"])).items():
            if subject in _COLD:
                values = [float(each["p50_us"]) * 1e-6 for each in turns]
                name = f"{subject}, {format_size(unit)}"
                lines.append(measured_line(name, values, _SECONDS, subject != GET))
    if lines:
        title = "Cold 4 KiB reads, by size of unit"
        yield Plot(title, "Median time (less is better)", "s", lines=lines)


_COLD = (GET, OURS, DEFAULT)


def _first_write(data: DocumentData) -> Iterator[Plot]:
    """Plot the bytes written when the first bytes of a large file are overwritten."""
    for each in contests(data):
        if "written" not in each.measure.key or "fuse-clone" not in each.peers:
            continue
        mine = median(each.values("fuse-clone"))
        lines = []
        for name in each.peers if mine > 0 else ():
            values = [value / mine for value in each.values(name)]
            middle = median(values)
            text = f"{each.measure.text(middle * mine)}, {ratio_text(middle)}×"
            lines.append(Line(name, values, text, is_ours(name), middle))
        if lines:
            title = "Written for the first 4 KiB in a large file"
            axis = "Times what a clone writes (left is better)"
            yield Plot(title, axis, lines=lines, ratios=True)


def _memory(data: DocumentData) -> Iterator[Plot]:
    lines = [
        measured_line(stage, [float(x["resident"]) for x in its], _BYTES, True)
        for stage, its in grouped(data.document["results"], _stage).items()
        if all("resident" in each for each in its)
    ]
    if max((line.middle for line in lines), default=0) >= MIB:
        axis = "Resident, all of it locked (less is better)"
        yield Plot("Memory of one block server, after", axis, "B", lines=lines)


def _stage(result: dict[str, object]) -> str:
    return str(result.get("stage"))


#: Each benchmark, its suite if any, and the function that plots it; in page order.
_TELLERS: Sequence[tuple[str, str | None, Callable[[DocumentData], Iterator[Plot]]]] = (
    ("compare", "fuse", _reads),
    ("fetching", None, _cold_reads),
    ("compare", "write-lazy", _first_write),
    ("lazy_memory", None, _memory),
)
