"""Tables of images.py: what became of images whose commands were killed."""

from __future__ import annotations

from collections.abc import Sequence

from btrfs_ublk.bench.report import Document, Result, Table, number
from btrfs_ublk.bench.stats import grouped


def faults_of(result: Result) -> list[str]:
    """Describe the faults of one round."""
    return [f"round {result['number']}: {each}" for each in result["problems"]]


def _row(name: str, rounds: Sequence[Result]) -> tuple[str, ...]:
    return (
        name,
        number(len(rounds)),
        number(sum(bool(each.get("killed")) for each in rounds)),
        number(sum(each.get("operations", 0) for each in rounds)),
        number(sum(bool(each["problems"]) for each in rounds)),
    )


def tables(document: Document) -> list[Table]:
    """Make a table with a row for each kind of command."""
    rounds = document["results"]
    kinds = grouped(rounds, lambda each: each["kind"])
    rows = [_row(kind, kinds[kind]) for kind in kinds]
    rows += [_row("all", rounds)] if rounds else []
    return [
        Table(
            f"Commands of images killed: {document['parameters']['front_end']}",
            ("killed", "rounds", "kills", "operations", "rounds with faults"),
            rows,
            1,
            "Each command is killed at a random moment, unless it ended before, and "
            "run again. Operations are those that a process did meanwhile in a fork, "
            "which was compared with what it had written, before and after the volume "
            "was down; the image with its source, and what is left with what there was "
            "before.",
        )
    ]
