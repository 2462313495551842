"""Tables of kills.py: which deaths of its processes a volume's readers and writers
notice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from btrfs_ublk.bench.report import Document, Result, Table, number
from btrfs_ublk.bench.stats import grouped, quantile

_BOTH = ["daemon", "servers"]
ALL = "all three"
#: Commands that run while the others of their step are killed.
UP, UPGRADE = "up", "upgrade"
#: What is killed at once, of all volumes; and again, or what else, up to half a second
#: after what was killed before is back. After TERM or STOP, it gets that signal; what
#: is stopped gets CONT up to half a second after all others of its step got theirs.
KINDS: dict[str, Sequence[Sequence[str]]] = {
    "daemon": [["daemon"]],
    "daemon + servers": [_BOTH],
    "daemon, servers, keepers": [["daemon"], ["servers"], ["keepers"]],
    "servers": [["servers"]],
    "servers, servers": [["servers"], ["servers"]],
    "daemon + servers, again": [_BOTH, _BOTH],
    "servers + keepers": [["servers", "keepers"]],
    "keepers": [["keepers"]],
    "daemon + keepers": [["daemon", "keepers"]],
    ALL: [[*_BOTH, "keepers"]],
    "servers get STOP": [["STOP servers"]],
    "all get STOP": [["STOP servers", "STOP daemon", "STOP keepers"]],
    "servers, daemon gets STOP": [["STOP daemon", "servers"]],
    "daemon + servers, keepers get STOP": [["STOP keepers", *_BOTH]],
    "servers get TERM": [["TERM servers"]],
    "servers get TERM, TERM": [["TERM servers"], ["TERM servers"]],
    "keepers get TERM": [["TERM keepers"]],
    "daemon gets TERM": [["TERM daemon"]],
    "servers, daemon gets TERM": [["TERM daemon", "servers"]],
    "daemon during up": [[UP, "daemon"]],
    "servers during up": [[UP, "servers"]],
    "daemon + servers during up": [[UP, *_BOTH]],
    UPGRADE: [[UPGRADE]],
    "daemon during upgrade": [[UPGRADE, "daemon"]],
    "servers during upgrade": [[UPGRADE, "servers"]],
    "daemon + servers during upgrade": [[UPGRADE, *_BOTH]],
}
#: Those of one step without a command, after which reads and writes go on.
SINGLE: dict[str, Sequence[str]] = {
    kind: steps[0]
    for kind, steps in KINDS.items()
    if len(steps) == 1 and kind != ALL and not {UP, UPGRADE} & {*steps[0]}
}
#: Counts of a round that must be 0 for readers and writers.
_COUNTED = {"read_errors": "failed reads", "wrong_bytes": "wrong bytes read"}


def faults_of(result: Result) -> list[str]:
    """Describe the faults of one round. A device that is "over" may fail requests, but
    must not lose what was written.
    """
    where = f"round {result['number']}"
    found = []
    if "hang" in result:
        found.append(f"{where} ended early: {result['hang'].splitlines()[0]}")
    for name, what in _COUNTED.items():
        if result.get(name) and not (result.get("over") and name == "read_errors"):
            found.append(f"{where}: {number(result[name])} {what}")
    for error in () if result.get("over") else result.get("write_errors", ()):
        found.append(f"{where}: {error}")
    for when, differences in result.get("different", {}).items():
        if differences:
            found.append(
                f"{where}: {len(differences)} differ, {when}: {differences[0]}"
            )
    if result.get("check", "clean") != "clean":
        found.append(f"{where}: btrfs check: {result['check'].splitlines()[-1:]}")
    return found


def _different(result: Result) -> int:
    return max((len(x) for x in result.get("different", {}).values()), default=0)


def _ms(rounds: Sequence[Result], share: float, key: str = "recovery_s") -> str:
    times = sorted(each[key] for each in rounds if key in each)
    return number(quantile(times, share) * 1e3 if times else math.nan)


def _row(name: str, rounds: Sequence[Result]) -> tuple[str, ...]:
    def total(key: str) -> str:
        return number(sum(each.get(key, 0) for each in rounds))

    return (
        name,
        number(len(rounds)),
        total("kills"),
        *(_ms(rounds, share) for share in (0.5, 0.99, 1.0)),
        _ms(rounds, 0.99, "settled_s"),
        *(total(key) for key in _COUNTED),
        number(sum(len(each.get("write_errors", ())) for each in rounds)),
        number(sum(_different(each) for each in rounds)),
        number(sum(each.get("check", "clean") != "clean" for each in rounds)),
        number(sum("hang" in each for each in rounds)),
    )


def tables(document: Document) -> list[Table]:
    """Make a table with a row for each kind of death."""
    rounds = document["results"]
    kinds = grouped(rounds, lambda each: each["kind"])
    rows = [_row(kind, kinds[kind]) for kind in KINDS if kind in kinds]
    rows += [_row("all", rounds)] if rounds else []
    operations = number(sum(each.get("operations", 0) for each in rounds))
    remounts = number(sum("check" in each for each in rounds))
    reads = number(sum(each.get("reads", 0) for each in rounds))
    volumes = document["parameters"]["volumes"]
    return [
        Table(
            f"Volumes' processes killed: {document['parameters']['front_end']}",
            (
                *("killed", "rounds", "kills", "p50 ms", "p99 ms", "max ms"),
                *(
                    "settled p99 ms",
                    "failed reads",
                    "wrong bytes",
                    "failed writes",
                    "differ",
                    "check",
                ),
                "hangs",
            ),
            rows,
            1,
            f"{volumes} volumes are up, with one daemon, and a server and a keeper "
            "each. The times are from the last kill until each volume has answered an "
            "uncached read that began after it; settled is until all devices have "
            "servers, keepers and a daemon again. After a comma: what is killed up to "
            f"0.5 s after what was killed before is back. {operations} operations were "
            "mirrored; what differs was compared at once, after a sync with empty "
            f"caches, and {remounts} times after down and up; check counts complaints "
            "of btrfs check. Reads fail when all three are killed and fuse has lost "
            f"its connection. {reads} reads were verified.",
        )
    ]
