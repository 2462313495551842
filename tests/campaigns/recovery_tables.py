"""Tables of recovery.py: what readers and writers noticed of their server's deaths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from btrfs_ublk.bench.report import Document, Result, Table, number
from btrfs_ublk.bench.stats import grouped, quantile
from btrfs_ublk.bench.study import Column, listing
from btrfs_ublk.units import GIB

RANDOM = "random"
AT_ONCE = "at once"
TWICE = "twice"
STARTING = "starting"
STOPPED = "stopped"
ADOPTED = "adopted"
BOTH = "both"
#: The explanation of each kind in the table's note.
KINDS = {
    RANDOM: "at a random time",
    AT_ONCE: "as soon as reads are answered again after the kill before",
    TWICE: "and so is its successor, as soon as it says that it is ready",
    STARTING: "and so is its successor, within milliseconds of its start",
    STOPPED: "after it was stopped for a while (SIGSTOP)",
    ADOPTED: "after its supervisor was, and another one has adopted it",
    BOTH: "together with the supervisor; then: btrfs-ublk device recover",
}

#: Counts that must be 0 for a reader.
_SEEN = ("wrong_bytes", "errors", "hung")


def _of(document: Document, what: str) -> list[Result]:
    return [result for result in document["results"] if result["what"] == what]


def faults(document: Document) -> list[str]:
    """Describe the faults that readers and writers saw."""
    found = [f"hung: {each['reason']}" for each in _of(document, "hang")]
    for reader in _of(document, "reader"):
        for name in _SEEN:
            if reader[name]:
                what = name.replace("_", " ")
                found.append(f"{reader['name']}: {reader[name]} {what}")
    for writer in _of(document, "writer"):
        found += [f"writer: {error}" for error in writer["errors"]]
    return found


def _ms(values: Sequence[float], share: float) -> str:
    return number(quantile(sorted(values), share) * 1e3, 1)


def _share(key: str, share: float) -> Callable[[Sequence[Result]], str]:
    return lambda rounds: _ms([each[key] for each in rounds], share)


_KILLS = (
    Column("rounds", len),
    Column("kills", lambda rounds: sum(each["kills"] for each in rounds)),
    Column("ready p50 ms", _share("ready_s", 0.5)),
    Column("p50 ms", _share("recovery_s", 0.5)),
    Column("p99 ms", _share("recovery_s", 0.99)),
    Column("max ms", _share("recovery_s", 1.0)),
)
_READERS = (
    Column("reader", "name"),
    Column("reads", "reads"),
    Column("GiB", "bytes", 1, 1 / GIB),
    *(Column(name.replace("_", " "), name) for name in _SEEN),
    Column("p50 ms", "p50_ns", 1, 1e-6),
    Column("p99 ms", "p99_ns", 1, 1e-6),
    Column("max ms", "max_ns", 1, 1e-6),
    Column("longest pause ms", "pause_ns", 1, 1e-6),
)
_WRITERS = (
    Column("files", "files"),
    Column("errors", lambda writer: len(writer[0]["errors"])),
    Column("max ms", "max_s", 1, 1e3),
)


def _bound(document: Document) -> str:
    rounds = len(_of(document, "round"))
    if rounds < 3 or faults(document):
        return ""
    # With no event in N trials, the rate is below 3/N, with 95 % confidence.
    return (
        f" Nobody saw any of {rounds} rounds: it is less than one in "
        f"{max(1, rounds // 3)} that is seen (95 %)."
    )


def tables(document: Document) -> list[Table]:
    """Make tables of recovery times by kind of kill, and of what readers saw."""
    rounds = _of(document, "round")
    kinds = grouped(rounds, lambda each: each["kind"])
    kinds = {kind: kinds[kind] for kind in KINDS if kind in kinds}
    explained = "; ".join(f"{kind}: {KINDS[kind]}" for kind in kinds)
    kinds |= {"all": rounds} if rounds else {}
    given = document["parameters"]
    how = "supervised" if given["supervisor"] else "recovered by hand"
    what = "the device" if given["raw"] else "clones on a sprout"
    made = [
        Table(
            f"Servers killed: {given['front_end']}, {how}, reads of {what}",
            ("killed", *(column.head for column in _KILLS)),
            [
                (kind, *(column.cell(its) for column in _KILLS))
                for kind, its in kinds.items()
            ],
            1,
            "From the (first) kill to the first answer to a read that began after the "
            "(last) death; that read has to wait for those before it. Ready: until the "
            f"(last) server says so. A server is killed {explained}.{_bound(document)}",
        ),
        listing("Verified reads meanwhile", _of(document, "reader"), _READERS),
    ]
    if writers := _of(document, "writer"):
        title = "Small files written, flushed and read back meanwhile"
        made.append(listing(title, writers, _WRITERS, left=0))
    return made
