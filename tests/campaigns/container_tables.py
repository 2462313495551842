"""Tables of containers.py: which kills containers notice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, permutations
from statistics import median

from btrfs_ublk.bench.report import Document, Result, Table, number
from btrfs_ublk.bench.stats import grouped, quantile

_ROLES = ("snapshotter", "daemon", "servers", "containerd")
#: Nothing is killed: another build of the package takes the place of all that runs.
UPGRADE = "upgrade"
#: What is killed at once, or gets another signal (killable.signal_at_once()).
KINDS: dict[str, Sequence[str]] = {
    **{role: [role] for role in _ROLES},
    **{" + ".join(pair): pair for pair in combinations(_ROLES, 2)},
    **{f"{role} gets STOP": [f"STOP {role}"] for role in _ROLES},
    **{f"{role} gets TERM": [f"TERM {role}"] for role in _ROLES},
    "all get STOP": [f"STOP {role}" for role in _ROLES],
    **{
        f"{first}, {second} gets STOP": [first, f"STOP {second}"]
        for first, second in permutations(("snapshotter", "servers", "containerd"), 2)
    },
    UPGRADE: (),
}
#: A new container may take as long after what was killed is started again.
LONGEST_S = 5


def faults_of(result: Result) -> list[str]:
    """Describe the faults of one round."""
    return [f"round {result['number']}: {each}" for each in result["problems"]]


def _row(name: str, rounds: Sequence[Result]) -> tuple[str, ...]:
    times = sorted(each["new_s"] for each in rounds if "new_s" in each)

    def seconds(share: float) -> str:
        return f"{quantile(times, share):.2f}" if times else number(math.nan)

    def middle(key: str) -> str:
        found = [each[key] for each in rounds if "new_s" in each and key in each]
        return f"{median(found):.2f}" if found else number(math.nan)

    return (
        name,
        number(len(rounds)),
        number(sum(each.get("kills", 0) for each in rounds)),
        number(sum(each.get("operations", 0) for each in rounds)),
        *map(
            middle, ("snapshotter_s", "containerd_s", "tried_s", "pod_s", "running_s")
        ),
        *map(seconds, (0.5, 0.99, 1.0)),
        number(sum(each > LONGEST_S for each in times)),
        number(sum(each.get("pulled", 0) for each in rounds)),
        number(sum(each.get("kept", 0) for each in rounds)),
        number(sum(bool(each["problems"]) for each in rounds)),
    )


def tables(document: Document) -> list[Table]:
    """Make a table with a row for each kind of kill."""
    rounds = document["results"]
    kinds = grouped(rounds, lambda each: each["kind"])
    rows = [_row(kind, kinds[kind]) for kind in KINDS if kind in kinds]
    rows += [_row("all", rounds)] if rounds else []
    undisturbed = [each["undisturbed_s"] for each in rounds]
    usual = f"{median(undisturbed):.2f}" if undisturbed else "-"
    return [
        Table(
            f"Killed beneath {document['parameters']['containers']} containers",
            (
                *("killed", "rounds", "kills", "operations"),
                *("snapshotter s", "containerd s", "tried s", "pod s", "running s"),
                *("new p50 s", "p99 s", "max s", f"over {LONGEST_S} s"),
                *("pulled again", "kept", "with faults"),
            ),
            rows,
            1,
            "The times are from when containerd or the snapshotter were started again, "
            "or else from the kill, until a container of a new pod has read a file; "
            f"before anything is killed, that takes {usual} s (median). "
            "Before them, when both took connections again, when the try began "
            "that had success, and when its pod ran and its container (medians). "
            "Pulled again: containerd had come up before the snapshotter, and did not "
            "know its images any more. Kept: shims without a task, which containerd "
            "had just started when it was killed. "
            "Operations are those of processes that change files of containers.",
        )
    ]
