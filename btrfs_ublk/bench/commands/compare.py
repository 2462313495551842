"""``btrfs-ublk bench compare``: measures peers in turn."""

import json
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from btrfs_ublk.base.entry import SecondsType, completing
from btrfs_ublk.bench import options
from btrfs_ublk.bench.cpu_load import HOGS, hogs
from btrfs_ublk.bench.peer import all_peers, setting, why_not
from btrfs_ublk.bench.reading import Turn, check_workload, find_peers, taking_part
from btrfs_ublk.bench.report import FAILED, OK, SKIPPED, Result, finish, make_document
from btrfs_ublk.bench.suite import Comparison, find_suite, suite_names
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError, UsageError

_WORKLOADS = ("randread-psync", "randread-uring-d64")


@dataclass(frozen=True)
class Plan:
    """How comparisons are measured, in seconds and bytes. ``queues`` and ``depth`` are
    for block servers; with None, each uses its own default. ``hog``: see hogs().
    """

    turns: int
    runtime_s: float
    size_bytes: int
    queues: int | None
    depth: int | None
    seed: int
    hog: str | None = None


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
        check_workload(workload)
    peers = find_peers(comparison.peers)
    reasons = {each.name: why_not(each) for each in peers}
    run = secrets.token_hex(4)
    about = {
        each.name: {
            "comparison": comparison.title,
            "run": run,
            "peer": each.name,
            "layer": each.layer,
        }
        for each in peers
    }
    with (
        setting(
            parent,
            size_bytes=plan.size_bytes,
            queues=plan.queues,
            depth=plan.depth,
            runtime_s=plan.runtime_s,
        ) as place,
        ExitStack() as stack,
    ):
        turns: dict[str, Turn] = {}
        for each in peers:
            reason = reasons[each.name]
            if reason is not None:
                yield {**about[each.name], "status": SKIPPED, "reason": reason}
                continue
            progress(f"{each.name}: {each.description}")
            try:
                turns[each.name] = stack.enter_context(taking_part(each, place))
            except (BtrfsUblkError, OSError) as error:
                yield about[each.name] | _failure(error)
        cannot: set[tuple[str, str]] = set()
        for turn, workload, name in blocks(list(turns), comparison.workloads, plan):
            if name not in turns or (name, workload) in cannot:
                continue
            result = _take_turn(turns[name], workload, plan, turn)
            if result["status"] == FAILED:
                del turns[name]
            elif result["status"] == SKIPPED:
                cannot.add((name, workload))
            result = about[name] | {"workload": workload, "turn": turn} | result
            yield result
            progress(_line(result))


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


def _line(result: Result) -> str:
    what = f"turn {result['turn']}: {result['workload']} {result['peer']}"
    if result["status"] != OK:
        return f"{what}: {result['reason']}"
    return f"{what}: {result['iops']:,.0f} IOPS"


def _list(*, as_json: bool) -> None:
    peers = [
        {"name": name, "description": peer.description, "missing": why_not(peer)}
        for name, peer in all_peers().items()
    ]
    suites = {name: find_suite(name).description for name in suite_names()}
    if as_json:
        click.echo(json.dumps({"peers": peers, "suites": suites}, indent=2))
        return
    for peer in peers:
        missing = f"\n    not here: {peer['missing']}" if peer["missing"] else ""
        click.echo(f"{peer['name']:27} {peer['description']}{missing}")
    for name, description in suites.items():
        click.echo(f"--suite {name:19} {description}")


@click.command("compare", context_settings=options.SETTINGS)
@click.argument("peers", nargs=-1, shell_complete=completing(all_peers))
@click.option(
    "--suite",
    shell_complete=completing(suite_names),
    help="Peers and workloads of that name; --list has them.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME",
    help="How to read: randread or seqread; -4k or -1m; -psync, -uring, -libaio or "
    "-mmap; -dN for a depth, -jN for N jobs.  "
    f"[{' and '.join(_WORKLOADS)}]",
)
@click.option("--turns", type=options.COUNT, default=10, help="Of each peer.")
@click.option(
    "--runtime",
    "runtime_s",
    type=SecondsType(min=0.5),
    default=3.0,
    metavar="SECONDS",
    help="Of each turn of fio.",
)
@options.size_option("256M", "What is read of each.")
@click.option("--queues", type=options.COUNT, help="Of block servers.")
@click.option("--depth", type=options.COUNT, help="Of each of their queues.")
@click.option(
    "--hog",
    type=click.Choice(list(HOGS)),
    help="Meanwhile a busy process on each CPU, of low or usual priority.",
)
@click.option("--seed", default=1, help="Decides the order.")
@options.common_options()
@click.option(
    "--list",
    "listed",
    is_flag=True,
    help="What there is to compare, and whether it can run here.",
)
def command(
    peers: Sequence[str],
    suite: str | None,
    workloads: Sequence[str],
    runtime_s: float,
    size_bytes: int,
    parent: Path,
    as_json: bool,
    listed: bool,
    **given: Any,
) -> int:
    """Measure peers in turn, against the first one.

    PEERS are some of what --list names. A peer that cannot run here is named with the
    reason. Exit status 1: one failed, or its data were wrong.
    """
    if listed:
        _list(as_json=as_json)
        return 0
    if (suite is None) == (not peers):
        raise UsageError("name peers to compare, or a --suite", hint="see --list")
    # What else is given are fields of the plan.
    plan = Plan(runtime_s=runtime_s, size_bytes=size_bytes, **given)
    comparisons: Sequence[Comparison]
    if suite is None:
        title = " / ".join(peers)
        comparisons = [Comparison(title, peers, workloads or _WORKLOADS)]
    else:
        chosen = find_suite(suite)
        plan = replace(
            plan, queues=plan.queues or chosen.queues, depth=plan.depth or chosen.depth
        )
        comparisons = [
            replace(
                each,
                workloads=workloads or each.workloads,
                bars=[
                    x for x in each.bars if x.workload in (workloads or each.workloads)
                ],
            )
            for each in chosen.comparisons()
        ]
    for comparison in comparisons:
        find_peers(comparison.peers)
        for name in comparison.workloads:
            check_workload(name)
    document = make_document(
        "compare",
        parameters={
            "suite": suite,
            **asdict(plan),
            "comparisons": [each.to_dict() for each in comparisons],
        },
        directory=parent,
        results=[],
    )
    document["complete"] = False
    try:
        for comparison in comparisons:
            for result in compare(
                comparison, plan, parent=parent, progress=options.progress
            ):
                document["results"].append(result)
        document["complete"] = True
    finally:
        # Results so far are printed even after an interrupt or an error.
        if document["results"]:
            finish(document, as_json=as_json)
    return int(any(x["status"] == FAILED for x in document["results"]))
