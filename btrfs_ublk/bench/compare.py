"""Comparing peers in turn: what ``btrfs-ublk bench compare`` measures."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.bench.comparison_tables import tables
from btrfs_ublk.bench.cpu_load import hogs
from btrfs_ublk.bench.environment import wait_until_quiet
from btrfs_ublk.bench.measurement import Contestant, Measure, Turn
from btrfs_ublk.bench.peer import Setting, setting, why_not
from btrfs_ublk.bench.report import FAILED, OK, SKIPPED, Result
from btrfs_ublk.bench.suite import Comparison
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError

__all__ = ["FAILED", "OK", "SKIPPED", "Plan", "blocks", "compare", "tables"]


@dataclass(frozen=True)
class Plan:
    """How comparisons are measured, in seconds and bytes. ``queues`` and ``depth`` are
    for block servers; with None, each uses its own default. ``hog``: see hogs().
    ``disk`` is a block device that is only read.
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
    disk: Path | None = None


def compare(
    comparison: Comparison,
    plan: Plan,
    *,
    parent: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Yield a result for each peer, workload and turn, and one, with the reason, for
    each peer that is not measured. All peers are up from the first turn to the last.

    A block is all peers once, in random order, with one workload. A peer that fails, or
    whose data are wrong, is left out from then on; one that cannot do a workload is
    left out of that. Raises UsageError for unknown names before anything is made, and
    CapabilityError for a workload that this machine cannot do.
    """
    for workload in comparison.workloads:
        comparison.contest.check(workload)
    contestants = comparison.contest.find(comparison.peers)
    reasons = {each.name: why_not(each) for each in contestants}
    run = secrets.token_hex(4)
    about = {
        each.name: {
            "comparison": comparison.title,
            "run": run,
            "peer": each.name,
            "layer": each.layer,
        }
        for each in contestants
    }
    with (
        setting(
            parent,
            size_bytes=plan.size_bytes,
            queues=plan.queues,
            depth=plan.depth,
            realtime=plan.realtime,
            runtime_s=plan.runtime_s,
            disk=plan.disk,
        ) as place,
        ExitStack() as stack,
    ):
        turns: dict[str, Turn] = {}
        for each in contestants:
            reason = reasons[each.name]
            if reason is not None:
                yield {**about[each.name], "status": SKIPPED, "reason": reason}
                continue
            progress(f"{each.name}: {each.description}")
            try:
                turns[each.name] = _brought_up(each, place, stack)
            except (BtrfsUblkError, OSError) as error:
                yield about[each.name] | _failure(error)
        cannot: set[tuple[str, str]] = set()
        for turn, workload, name in blocks(list(turns), comparison.workloads, plan):
            if name not in turns or (name, workload) in cannot:
                continue
            wait_until_quiet(timeout_s=plan.patience_s)
            result = _take_turn(turns[name], workload, plan, turn)
            if result["status"] == FAILED:
                del turns[name]
            elif result["status"] == SKIPPED:
                cannot.add((name, workload))
            result = about[name] | {"workload": workload, "turn": turn} | result
            yield result
            progress(_line(result, comparison.contest.measures))


def _brought_up(each: Contestant, place: Setting, stack: ExitStack) -> Turn:
    with ExitStack() as mine:
        turn = mine.enter_context(each.taking_part(place))
        stack.enter_context(mine.pop_all())
    return turn


def blocks(
    names: Sequence[str], workloads: Sequence[str], plan: Plan
) -> Iterator[tuple[int, str, str]]:
    """Yield (turn, workload, peer) in the order of measuring, given by the seed."""
    chances = random.Random(plan.seed)
    for turn in range(1, plan.turns + 1):
        for workload in workloads:
            for name in chances.sample(names, k=len(names)):
                yield turn, workload, name


def _take_turn(turn: Turn, workload: str, plan: Plan, number: int) -> Result:
    try:
        with hogs(plan.hog):
            result = turn(workload, random.Random(f"{plan.seed} {number}"))
    except (BtrfsUblkError, OSError, EOFError) as error:
        return _failure(error)
    return {"status": OK} | result


def _failure(error: Exception) -> Result:
    cannot = isinstance(error, CapabilityError)
    return {"status": SKIPPED if cannot else FAILED, "reason": str(error)}


def _line(result: Result, measures: Sequence[Measure]) -> str:
    what = f"turn {result['turn']}: {result['workload']} {result['peer']}"
    if result["status"] != OK:
        return f"{what}: {result['reason']}"
    figures = (f"{result[x.name]:,.{x.digits}f} {x.unit}" for x in measures)
    return f"{what}: {', '.join(figures)}"
