"""Do reads survive the death of their server? It is killed again and again, at random
and at awkward moments, while every byte that is read is verified.

``python -m btrfs_ublk.bench.recovery --help``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.kills import (
    KINDS,
    RANDOM,
    awkward_kinds,
    plan,
    run_rounds,
    trial,
)
from btrfs_ublk.bench.report import (
    Document,
    Highlight,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.bench.stats import grouped, quantile
from btrfs_ublk.capabilities import BTRFS, FUSE, LOOP, ROOT, UBLK, Helper, require
from btrfs_ublk.entry import run_command
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.helpers import MKSEED, SERVER, VERIFY_READS
from btrfs_ublk.server import FrontEndName


def _of(document: Document, what: str) -> list[Result]:
    return [result for result in document["results"] if result["what"] == what]


def faults(document: Document) -> list[str]:
    """What a reader or writer saw of the kills; for people."""
    found = [f"hung: {each['reason']}" for each in _of(document, "hang")]
    for reader in _of(document, "reader"):
        for name in ("wrong_bytes", "errors", "hung"):
            if reader[name]:
                what = name.replace("_", " ")
                found.append(f"{reader['name']}: {reader[name]} {what}")
    for writer in _of(document, "writer"):
        found += [f"writer: {error}" for error in writer["errors"]]
    return found


def _ms(values: Sequence[float], share: float) -> str:
    return number(quantile(sorted(values), share) * 1e3, 1)


def _kill_row(name: str, rounds: Sequence[Result]) -> tuple[str, ...]:
    return (
        name,
        number(len(rounds)),
        number(sum(each["kills"] for each in rounds)),
        _ms([each["ready_s"] for each in rounds], 0.5),
        *(
            _ms([each["recovery_s"] for each in rounds], share)
            for share in (0.5, 0.99, 1.0)
        ),
    )


def _bound(document: Document) -> str:
    rounds = len(_of(document, "round"))
    if rounds < 3 or faults(document):
        return ""
    # Nothing in N trials: the rate is below 3/N, with 95 % confidence.
    return (
        f" Nobody saw any of {rounds} rounds: it is less than one in "
        f"{max(1, rounds // 3)} that is seen (95 %)."
    )


def tables(document: Document) -> list[Table]:
    """Recovery times by the kind of kill, and what the readers saw."""
    rounds = _of(document, "round")
    kinds = grouped(rounds, lambda each: each["kind"])
    rows = [_kill_row(kind, kinds[kind]) for kind in KINDS if kind in kinds]
    rows += [_kill_row("all", rounds)] if rounds else []
    explained = "; ".join(f"{kind}: {KINDS[kind]}" for kind in KINDS if kind in kinds)
    given = document["parameters"]
    how = "supervised" if given["supervisor"] else "recovered by hand"
    what = "the device" if given["raw"] else "clones on a sprout"
    made = [
        Table(
            f"Servers killed: {given['front_end']}, {how}, reads of {what}",
            ("killed", "rounds", "kills", "ready p50 ms", "p50 ms", "p99 ms", "max ms"),
            rows,
            1,
            "From the (first) kill to the first answer to a read that began after the "
            "(last) death; that read has to wait for those before it. Ready: until the "
            f"(last) server says so. A server is killed {explained}.{_bound(document)}",
        ),
        Table(
            "Verified reads meanwhile",
            (
                *("reader", "reads", "GiB", "wrong bytes", "errors", "hung"),
                *("p50 ms", "p99 ms", "max ms", "longest pause ms"),
            ),
            [
                (
                    each["name"],
                    number(each["reads"]),
                    number(each["bytes"] / (1 << 30), 1),
                    *(number(each[x]) for x in ("wrong_bytes", "errors", "hung")),
                    *(
                        number(each[f"{x}_ns"] / 1e6, 1)
                        for x in ("p50", "p99", "max", "pause")
                    ),
                )
                for each in _of(document, "reader")
            ],
        ),
    ]
    writers = _of(document, "writer")
    if writers:
        made.append(
            Table(
                "Small files written, flushed and read back meanwhile",
                ("files", "errors", "max ms"),
                [
                    (
                        number(each["files"]),
                        number(len(each["errors"])),
                        number(each["max_s"] * 1e3, 1),
                    )
                    for each in writers
                ],
                0,
            )
        )
    return made


def highlights(document: Document) -> list[Highlight]:
    """What the readers saw of the kills."""
    rounds = _of(document, "round")
    if not rounds:
        return []
    found = faults(document)
    kills = number(sum(each["kills"] for each in rounds))
    reads = sum(reader["reads"] for reader in _of(document, "reader"))
    median = _ms([each["recovery_s"] for each in rounds], 0.5)
    return [
        Highlight(
            f"{len(found)} faults",
            f"{kills} kills of the {document['parameters']['front_end']} server under "
            "verified reads",
            f"{number(reads)} reads; half of the time, reads went on within {median} "
            f"ms. {'; '.join(found)}",
        )
    ]


@click.command(context_settings=options.SETTINGS)
@click.option("--rounds", type=options.COUNT, default=300)
@click.option(
    "--front-end", type=click.Choice(["ublk", "fuse"]), default="ublk", help="Which."
)
@click.option(
    "--supervisor/--no-supervisor",
    default=True,
    help="Devices of `btrfs-ublk device add`, or the helper alone, recovered by hand.",
)
@click.option(
    "--awkward",
    type=click.Choice([kind for kind in KINDS if kind != RANDOM]),
    multiple=True,
    help="Only these besides kills at random times.  [default: all]",
)
@click.option("--raw", is_flag=True, help="Read the device, without a file system.")
@click.option("--depth", type=click.IntRange(1, 1024), default=64, help="Direct reads.")
@click.option("--seed", type=click.IntRange(min=0), default=1, help="Of all chances.")
@click.option(
    "--deadline",
    "deadline_s",
    type=click.IntRange(min=1),
    default=60,
    metavar="SECONDS",
    help="A read that takes longer hangs.",
)
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(min=0),
    default=math.inf,
    metavar="SECONDS",
    help="After that no round is begun.",
)
@options.parent_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, no tables.")
def command(
    rounds: int,
    front_end: FrontEndName,
    supervisor: bool,
    awkward: Sequence[str],
    raw: bool,
    depth: int,
    seed: int,
    deadline_s: int,
    limit_s: float,
    parent: Path,
    as_json: bool,
) -> None:
    """Kill the server under verified reads and writes, and see what they notice.

    Fails when any byte is wrong, any read fails, or takes longer than the deadline.
    """
    require(ROOT, BTRFS, LOOP, UBLK if front_end == "ublk" else FUSE)
    require(*map(Helper, (MKSEED, SERVER, VERIFY_READS)))
    possible = awkward_kinds(front_end, supervisor=supervisor)
    for kind in awkward:
        if kind not in possible:
            raise UsageError(
                f"--awkward {kind!r}: not with {front_end}, "
                f"{'a' if supervisor else 'no'} supervisor, and no error seen"
            )
    kinds = plan(rounds, awkward or possible)
    parameters = {
        "front_end": front_end,
        "supervisor": supervisor,
        "raw": raw,
        "rounds": rounds,
        "depth": depth,
        "seed": seed,
    }
    document = make_document(
        "recovery", parameters=parameters, directory=parent, results=[]
    )
    with trial(
        front_end=front_end,
        supervisor=supervisor,
        raw=raw,
        depth=depth,
        seed=seed,
        deadline_s=deadline_s,
        parent=parent,
    ) as made:
        try:
            for result in run_rounds(made, kinds, limit_s=limit_s):
                document["results"].append(result)
                _tell(result, len(document["results"]))
        finally:
            # Also after a failure, and before all is taken down, which may fail too.
            finish(document, as_json=as_json)
    found = faults(document)
    if found:
        raise BtrfsUblkError("the kills were seen: " + "; ".join(found))


def _tell(result: Result, position: int) -> None:
    if result["what"] == "round":
        faults_text = f", {result['faults']} faults so far" if result["faults"] else ""
        options.progress(
            f"round {position}: {result['kind']}: "
            f"{result['recovery_s'] * 1e3:.0f} ms{faults_text}"
        )
    elif result["what"] == "hang":
        options.progress(f"{result['reason']}\n{result['state']}")


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.recovery")
