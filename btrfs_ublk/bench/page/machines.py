"""The kind of machine that figures are from, and whether they are reliable."""

from __future__ import annotations

from statistics import median

from btrfs_ublk.bench.environment import QUIET_CORES
from btrfs_ublk.bench.page.inputs import Data, MatrixData
from btrfs_ublk.units import GIB

#: If more tasks than this per CPU run when a benchmark begins, others are running.
BUSY_LOAD = 3.0
#: Kinds by a record's "guest". Results of real machines are shown before those of
#: emulated ones.
_KINDS = {None: "native", "kvm": "vm", "icount": "icount", "tcg": "emulated"}
_ORDER = [*_KINDS.values(), "unknown"]


def labels_of(data: Data) -> list[str]:
    """Return the kind of machine, "busy" if it was, and "interrupted": words that
    page.html explains.
    """
    kind = "unknown"
    if data.record is not None:
        kind = _KINDS.get(data.record.get("guest"), "vm")
    # A clock that counts instructions stops while others run.
    found = [kind, *(["busy"] if kind != "icount" and _is_busy(data) else [])]
    if not isinstance(data, MatrixData) and data.document.get("complete") is False:
        found.append("interrupted")
    return found


def how_real(data: Data) -> tuple[int, int]:
    """A sort key: native measurements come first, and quiet machines."""
    labels = labels_of(data)
    return _ORDER.index(labels[0]), len(labels)


def _is_busy(data: Data) -> bool:
    record = data.record
    if record is not None and record["load"]:
        if float(record["load"][0]) > BUSY_LOAD * int(record["cpus"]):
            return True
    found: list[object] = []
    if isinstance(data, MatrixData):
        found = [(row.get("cpu") or {}).get("other") for row in data.rows]
    elif data.benchmark == "compare":
        # In other benchmarks, this key includes their own kernel threads.
        found = [result.get("other_cores") for result in data.document["results"]]
    others = [float(str(value)) for value in found if value is not None]
    return bool(others) and median(others) > QUIET_CORES


def machine_key(data: Data) -> tuple[object, ...]:
    """Return a key that is equal for data of one section."""
    record = data.record
    if record is None:
        return ("unknown",)
    keys = ("guest", "kernel", "architecture", "cpu", "cpus")
    # The kernel reserves a slightly different amount in each boot.
    memory = round(record["memory_bytes"] / GIB)
    return *(record.get(key) for key in keys), memory, "busy" in labels_of(data)
