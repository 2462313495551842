"""``btrfs-ublk bench compare``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.compare import FAILED, Plan, compare
from btrfs_ublk.bench.fio import Fio
from btrfs_ublk.bench.hogs import HOGS
from btrfs_ublk.bench.peer import all_peers, find_peers, why_not
from btrfs_ublk.bench.report import finish, make_document
from btrfs_ublk.bench.suite import Comparison, find_suite, suite_names
from btrfs_ublk.bench.workloads import HINT, parse_workload
from btrfs_ublk.capabilities import require
from btrfs_ublk.errors import UsageError

_WORKLOADS = ("randread-psync", "randread-uring-d64")


def _list(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    for name, peer in all_peers().items():
        reason = why_not(peer)
        missing = f"\n    not here: {reason}" if reason else ""
        click.echo(f"{name:27} {peer.description}{missing}")
    for name in suite_names():
        click.echo(f"--suite {name:19} {find_suite(name).description}")
    context.exit()


@click.command("compare", context_settings=options.SETTINGS)
@click.argument("peers", nargs=-1)
@click.option("--suite", help="A list of peers and workloads, by name.")
@click.option(
    "--workload", "workloads", multiple=True, help=f"{HINT}.  {list(_WORKLOADS)}"
)
@click.option("--turns", type=options.COUNT, default=10, help="Of each.")
@click.option(
    "--runtime",
    "runtime_s",
    type=click.FloatRange(min=0.5),
    default=3.0,
    metavar="SECONDS",
    help="Of each turn.",
)
@click.option(
    "--size",
    "size_bytes",
    default="256M",
    callback=options.parse_sizes,
    help="What is read of each.",
)
@click.option("--queues", type=options.COUNT, help="Of block servers.")
@click.option("--depth", type=options.COUNT, help="Of each of their queues.")
@click.option("--realtime", is_flag=True, help="Our servers run before all else.")
@click.option(
    "--hog",
    type=click.Choice(list(HOGS)),
    help="Meanwhile a busy process on each CPU, of low or usual priority.",
)
@click.option("--seed", default=1, help="Decides the order.")
@options.common_options()
@click.option(
    "--list",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_list,
    help="What there is to compare, and whether it can run here.",
)
def command(
    peers: Sequence[str],
    suite: str | None,
    workloads: Sequence[str],
    turns: int,
    runtime_s: float,
    size_bytes: int,
    queues: int | None,
    depth: int | None,
    realtime: bool,
    hog: str | None,
    seed: int,
    parent: Path,
    patience_s: float,
    as_json: bool,
) -> int:
    """Read at random from PEERS in turn, and hold all against the first one.

    A peer that cannot run here is named with the reason. Exit status 1: one failed, or
    its data were wrong.
    """
    if (suite is None) == (not peers):
        raise UsageError("name peers to compare, or a --suite", hint="see --list")
    if suite is not None:
        chosen = find_suite(suite)
        comparisons = [_with_workloads(each, workloads) for each in chosen.comparisons]
        queues, depth = queues or chosen.queues, depth or chosen.depth
    else:
        title = " / ".join(peers)
        comparisons = [Comparison(title, peers, workloads or _WORKLOADS)]
    for comparison in comparisons:
        find_peers(comparison.peers)
        for name in comparison.workloads:
            require(Fio(parse_workload(name).engine))
    plan = Plan(
        turns=turns,
        runtime_s=runtime_s,
        size_bytes=size_bytes,
        queues=queues,
        depth=depth,
        seed=seed,
        patience_s=patience_s,
        realtime=realtime,
        hog=hog,
    )
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
    try:
        for comparison in comparisons:
            for result in compare(
                comparison, plan, parent=parent, progress=options.progress
            ):
                document["results"].append(result)
    finally:
        # What was measured counts, also when it is interrupted, or leaves something.
        if document["results"]:
            finish(document, as_json=as_json)
    return int(any(x["status"] == FAILED for x in document["results"]))


def _with_workloads(comparison: Comparison, workloads: Sequence[str]) -> Comparison:
    """Others than the suite's; bars for those that are left out go with them."""
    if not workloads:
        return comparison
    return Comparison(
        comparison.title,
        comparison.peers,
        workloads,
        [bar for bar in comparison.bars if bar.workload in workloads],
    )
