"""Peers against each other, in turn: what ``btrfs-ublk bench compare`` measures."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from btrfs_ublk.bench.environment import wait_until_quiet
from btrfs_ublk.bench.hogs import hogs
from btrfs_ublk.bench.measure import measure
from btrfs_ublk.bench.peer import (
    Peer,
    Setting,
    Subject,
    find_peers,
    setting,
    why_not,
)
from btrfs_ublk.bench.report import Document, Result, Table, number
from btrfs_ublk.bench.stats import bootstrap_interval, grouped, median_of
from btrfs_ublk.bench.suite import Comparison
from btrfs_ublk.bench.workloads import Workload, parse_workload
from btrfs_ublk.errors import BtrfsUblkError

#: Results of a comparison have one of these as their "status".
OK, FAILED, SKIPPED = "ok", "failed", "skipped"
#: A bar's figure, as its row has it; larger is better.
_FIGURES: dict[str, Callable[[Result], float]] = {
    "iops": lambda result: float(result["iops"]),
    "per_core": lambda result: 1 / result["cpu_us"] if result.get("cpu_us") else 0.0,
}
_FIGURE_NAMES = {"iops": "I/O per second", "per_core": "I/O per CPU second"}


@dataclass(frozen=True)
class Plan:
    """How all comparisons are measured. Seconds and bytes; ``queues`` and ``depth`` are
    those of block servers, None leaves them to each. ``hog``: see hogs().
    """

    turns: int
    runtime_s: float
    size_bytes: int
    queues: int | None
    depth: int | None
    seed: int
    patience_s: float = 0.0
    realtime: bool = False
    hog: str | None = None


def compare(
    comparison: Comparison,
    plan: Plan,
    *,
    parent: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """One result for each peer, workload and turn, and one for each peer that is not
    measured, with the reason. All peers are up from the first turn to the last.

    A block is all peers once, in random order, with one workload. A peer that fails, or
    whose data are wrong, is left out from then on. Raises UsageError for names that
    there are not, before anything is made.
    """
    workloads = [parse_workload(name) for name in comparison.workloads]
    peers = find_peers(comparison.peers)
    reasons = {peer.name: why_not(peer) for peer in peers}
    common: Result = {"comparison": comparison.title, "run": secrets.token_hex(4)}
    with (
        setting(
            parent,
            size_bytes=plan.size_bytes,
            queues=plan.queues,
            depth=plan.depth,
            realtime=plan.realtime,
        ) as place,
        ExitStack() as stack,
    ):
        subjects: dict[str, Subject] = {}
        for peer in peers:
            about = common | {"peer": peer.name, "layer": peer.layer}
            reason = reasons[peer.name]
            if reason is not None:
                yield {**about, "status": SKIPPED, "reason": reason}
                continue
            progress(f"{peer.name}: {peer.description}")
            try:
                subjects[peer.name] = _brought_up(peer, place, stack)
            except (BtrfsUblkError, OSError) as error:
                yield {**about, "status": FAILED, "reason": str(error)}
        layers = {peer.name: peer.layer for peer in peers}
        for turn, workload, name in blocks(list(subjects), workloads, plan):
            about = common | {
                "peer": name,
                "layer": layers[name],
                "workload": workload.name,
                "turn": turn,
            }
            if name in subjects:
                wait_until_quiet(timeout_s=plan.patience_s)
                result = _turn(subjects[name], workload, place, plan, turn)
                if result["status"] == FAILED:
                    del subjects[name]
                yield about | result
                progress(_line(about | result))


def _brought_up(peer: Peer, place: Setting, stack: ExitStack) -> Subject:
    with ExitStack() as mine:
        subject = mine.enter_context(peer.serving(place))
        stack.enter_context(mine.pop_all())
    return subject


def blocks(
    names: Sequence[str], workloads: Sequence[Workload], plan: Plan
) -> Iterator[tuple[int, Workload, str]]:
    """Turn, workload, peer: in the order of measuring, which the seed decides."""
    chances = random.Random(plan.seed)
    for turn in range(1, plan.turns + 1):
        for workload in workloads:
            for name in chances.sample(names, k=len(names)):
                yield turn, workload, name


def _turn(
    subject: Subject, workload: Workload, place: Setting, plan: Plan, turn: int
) -> Result:
    try:
        with hogs(plan.hog):
            result = measure(
                subject,
                workload,
                size_bytes=plan.size_bytes,
                runtime_s=plan.runtime_s,
                output=place.directory / "fio.json",
                chances=random.Random(f"{plan.seed} {turn}"),
            )
    except (BtrfsUblkError, OSError, EOFError) as error:
        return {"status": FAILED, "reason": str(error)}
    return {"status": OK} | result


def _line(result: Result) -> str:
    what = f"turn {result['turn']}: {result['workload']} {result['peer']}"
    if result["status"] != OK:
        return f"{what}: {result['reason']}"
    return f"{what}: {result['iops']:,.0f}"


def ratio_of(
    results: Sequence[Result], baseline: Sequence[Result], figure: str
) -> tuple[float, float, float]:
    """Of the medians, and its 95 % interval; from the turns that both have."""
    value = _FIGURES[figure]
    # Different runs have turns of the same numbers.
    below = {(result["run"], result["turn"]): value(result) for result in baseline}
    both = [
        (value(result), below[result["run"], result["turn"]])
        for result in results
        if (result["run"], result["turn"]) in below
    ]
    both = [pair for pair in both if all(pair)]
    if not both:
        return math.nan, math.nan, math.nan
    values, bases = zip(*both)
    low, high = bootstrap_interval(values, bases, paired=True)
    return median(values) / median(bases), low, high


def _interval(low: float, high: float) -> str:
    return "-" if low != low else f"{low:.2f} - {high:.2f}"


def tables(document: Document) -> list[Table]:
    """For each comparison and workload one; the bars; what was not measured."""
    made = []
    bars: list[tuple[str, ...]] = []
    by_comparison = grouped(document["results"], lambda result: result["comparison"])
    for comparison in document["parameters"]["comparisons"]:
        results = by_comparison.get(comparison["title"], [])
        measured = [result for result in results if result["status"] == OK]
        by_workload = grouped(measured, lambda result: result["workload"])
        for workload, turns in by_workload.items():
            by_peer = grouped(turns, lambda result: result["peer"])
            made.append(_table(comparison, workload, by_peer))
        for bar in comparison["bars"]:
            turns = by_workload.get(bar["workload"], [])
            bars.append(_bar(comparison, bar, turns))
    if bars:
        head = ("bar", "workload", "of", "to", "wanted", "ratio", "95 %", "")
        made.append(Table("Bars", head, bars, left=4))
    missing = [
        (result["peer"], result.get("workload", "-"), result["reason"].splitlines()[0])
        for result in document["results"]
        if result["status"] != OK
    ]
    if missing:
        made.append(
            Table("Not measured", ("peer", "workload", "reason"), missing, left=3)
        )
    return made


def _table(
    comparison: dict[str, Any], workload: str, by_peer: dict[str, list[Result]]
) -> Table:
    baseline = comparison["peers"][0]
    rows = []
    for name in comparison["peers"]:
        turns = by_peer.get(name)
        if not turns:
            continue
        ratio, low, high = ratio_of(turns, by_peer.get(baseline, []), "iops")
        per_core, *_ = ratio_of(turns, by_peer.get(baseline, []), "per_core")
        rows.append(
            (
                name,
                str(len(turns)),
                number(median_of(turns, "iops")),
                number(ratio, 2),
                _interval(low, high) if name != baseline else "-",
                number(median_of(turns, "p50_us"), 1),
                number(median_of(turns, "p99_us"), 1),
                number(median_of(turns, "fio_us"), 1),
                number(median_of(turns, "server_us"), 1),
                number(median_of(turns, "kernel_us"), 1),
                number(per_core, 2),
                number(median_of(turns, "cores"), 2),
                number(median_of(turns, "other_cores"), 2),
            )
        )
    return Table(
        f"{comparison['title']}: {workload}",
        (
            *("peer", "turns", "IOPS", "ratio", "95 %", "p50 us", "p99 us"),
            *("fio us", "server us", "kernel us", "per core", "cores", "others"),
        ),
        rows,
        note=f"Medians. Ratio: of the medians, to that of {baseline}, over the turns "
        "that both have, with a bootstrap interval that draws pairs of them. "
        "CPU time per I/O: of the reader, of the server's threads, of the rest of the "
        "kernel; per core: ratio of I/O per CPU second. Cores: in use by these three, "
        "and by other processes.",
    )


def _bar(
    comparison: dict[str, Any], bar: dict[str, Any], turns: Sequence[Result]
) -> tuple[str, ...]:
    by_peer = grouped(turns, lambda result: result["peer"])
    baseline = comparison["peers"][0]
    ratio, low, high = ratio_of(
        by_peer.get(bar["peer"], []), by_peer.get(baseline, []), bar["of"]
    )
    verdict = "not measured" if ratio != ratio else "missed"
    if ratio >= bar["ratio"]:
        verdict = "met"
    return (
        bar["peer"],
        bar["workload"],
        _FIGURE_NAMES[bar["of"]],
        baseline,
        number(bar["ratio"], 2),
        number(ratio, 2),
        _interval(low, high),
        verdict,
    )
