"""Tables of faults.py, and what of a round is a failure."""

from __future__ import annotations

from btrfs_ublk.bench.report import Document, Result, Table

#: Until all reads succeed: time for circuit breakers and names, besides a deadline,
#: which is what requests take that are pending.
HEAL_TIMEOUT_S = 30
STALL_S = 1
_COUNTS = ("reads", "errors", "wrong_bytes", "hung", "other_errors")
_TIMES = ("max_s", "well_s", "stall_s")


def faults_of(result: Result) -> list[str]:
    """What went wrong in a round: a byte, an error that was not EIO, that was late, or
    that came where another mirror was well or after the end of the faults. Where the
    machine had no CPU for the campaign, and so for its name server, nothing of time
    counts."""
    found = [f"{what} is left" for what in result["left"]]
    starved = result["stall_s"] > STALL_S
    if not starved and result["well_s"] > HEAL_TIMEOUT_S + result["deadline_s"]:
        found.append(f"reads failed for {result['well_s']:.0f} s after the faults")
    for phase in ("", "healed_", "again_"):
        bad = ["wrong_bytes", "other_errors"]
        if not starved:
            bad.append("hung")
            if phase or not result["may_fail"]:
                bad.append("errors")
        found += [
            f"{result[phase + name]} {phase}{name}"
            for name in bad
            if result[phase + name]
        ]
        if not starved and not result[f"{phase}reads"]:
            found.append(f"no {phase}reads")
    name = " + ".join(result["faults"])
    return [f"{name}, seed {result['seed']}: {one}" for one in found]


def tables(document: Document) -> list[Table]:
    """Make a table with a row for each kind of fault; rounds with two are in both."""
    kinds = sorted({kind for each in document["results"] for kind in each["faults"]})
    rows = []
    for kind in [*kinds, "all"]:
        those = [x for x in document["results"] if kind in ("all", *x["faults"])]
        sums = [str(sum(each[name] for each in those)) for name in _COUNTS]
        slowest = (max(each[name] for each in those) for name in _TIMES)
        failed = sum(bool(faults_of(each)) for each in those)
        rows.append(
            (kind, str(len(those)), *sums, *(f"{x:.1f}" for x in slowest), str(failed))
        )
    names = [name.replace("_", " ") for name in (*_COUNTS, *_TIMES)]
    return [
        Table(
            "Reads of a lazy device while its source or cache fails",
            ["fault", "rounds", *names, "failed"],
            rows,
            note="Errors are EIO, with mmap SIGBUS, and others. Hung: no answer in "
            "time. The longest times: of a read, until reads succeeded after the "
            "faults, and in which the campaign itself had no CPU.",
        )
    ]
