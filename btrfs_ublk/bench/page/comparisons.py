"""The results of ``btrfs-ublk bench compare`` as charts and tables."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from btrfs_ublk.bench.compare import groups
from btrfs_ublk.bench.page.charts import Chart, measured_line
from btrfs_ublk.bench.page.inputs import DocumentData
from btrfs_ublk.bench.page.measures import (
    IOPS,
    Measure,
    is_number,
    told_measure,
    workload_words,
)
from btrfs_ublk.bench.report import Table
from btrfs_ublk.bench.stats import ratio_of

Result = Mapping[str, Any]

#: The names of our servers' peers (peers/ours.py), and of trees of clones.
_OURS = re.compile(r"(ublk|fuse)(-file|-cached)?(-clones?)?|(btrfs-ublk|sprout)(-.*)?")


@dataclass(frozen=True)
class Block:
    """Charts and tables that belong together, below one heading."""

    title: str
    intro: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


def comparison_blocks(data: DocumentData) -> list[Block]:
    """Make a block of charts for each comparison, and one of all figures."""
    charts: dict[str, list[Chart]] = {}
    for comparison, workload, by_peer in groups(data.document):
        told = comparison.get("measures")
        for measure in [told_measure(each) for each in told] if told else [IOPS]:
            chart = _chart(workload_words(str(workload)), measure, by_peer)
            charts.setdefault(str(comparison["title"]), []).extend(chart)
    made = [Block(title, charts=its) for title, its in charts.items()]
    if data.tables:
        made.append(Block("All figures", tables=data.tables))
    return made


def _chart(
    title: str, measure: Measure, by_peer: Mapping[str, Sequence[Result]]
) -> Iterator[Chart]:
    """Draw a measure of each peer, with its ratio to the first, if somebody has it."""
    peers = {
        str(name): found
        for name, its in by_peer.items()
        if (found := [x for x in its if is_number(x.get(measure.key))])
    }
    if not peers:
        return
    first = next(iter(peers))
    lines = [
        measured_line(
            name,
            [float(x[measure.key]) for x in its],
            measure,
            _OURS.fullmatch(name) is not None,
            ratio_of(its, peers[first], measure.key) if name != first else None,
        )
        for name, its in peers.items()
    ]
    better = "more is better" if measure.more_is_better else "less is better"
    note = f"×: of {first} in the same turns" if len(peers) > 1 else ""
    yield Chart(title, f"{measure.title}, {better}", lines, note)
