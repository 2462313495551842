"""What kind of machine figures are from, and whether they are to be believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from btrfs_ublk.bench.environment import QUIET_CORES
from btrfs_ublk.bench.page.inputs import Data, DocumentData, MatrixData, Record
from btrfs_ublk.units import GIB, format_size

#: More tasks than this for each CPU, when a benchmark begins, are others'.
_BUSY_LOAD = 3.0


@dataclass(frozen=True)
class Label:
    """``kind`` is a word for style sheets, ``meaning`` a sentence."""

    kind: str
    text: str
    meaning: str


_GUESTS = {
    None: Label(
        "native", "native", "Measured on the machine itself, with its own kernel."
    ),
    "kvm": Label("vm", "virtual machine", "Measured in a virtual machine (KVM)."),
    "tcg": Label(
        "emulated",
        "emulated",
        "Measured in a virtual machine whose CPU is emulated by software: times say "
        "how much is to be done, not how long it takes on a real CPU.",
    ),
    "icount": Label(
        "icount",
        "emulated, instructions counted",
        "The clock of an emulated machine counts instructions: 1 ns is one "
        "instruction. Figures repeat to the percent, however busy the host is; they "
        "say nothing of caches, memory or real time.",
    ),
}
_UNKNOWN = Label(
    "unknown", "unknown machine", "The file does not say where it was measured."
)
BUSY = Label(
    "busy",
    "busy machine",
    f"Other programs ran meanwhile: they used more than {QUIET_CORES} CPU cores in the "
    f"median turn, or more than {_BUSY_LOAD:g} tasks for each CPU ran when it began. "
    "Counts are good, times are not.",
)


INCOMPLETE = Label(
    "incomplete", "interrupted", "It ended before all that was planned was measured."
)


def machine_label(record: Record | None) -> Label:
    if record is None:
        return _UNKNOWN
    guest = record.get("guest")
    known = _GUESTS.get(guest)
    return known or Label("vm", str(guest), "Measured in a virtual machine.")


def labels_of(data: Data) -> list[Label]:
    """The kind of machine, "busy" where it was, and "interrupted"."""
    found = [machine_label(data.record)]
    # A counting clock stands still while others run.
    if found[0].kind != "icount" and is_busy(data):
        found.append(BUSY)
    if isinstance(data, DocumentData) and data.document.get("complete") is False:
        found.append(INCOMPLETE)
    return found


def is_busy(data: Data) -> bool:
    record = data.record
    if record is not None and record["load"]:
        if float(record["load"][0]) > _BUSY_LOAD * int(record["cpus"]):
            return True
    others = _other_cores(data)
    return bool(others) and median(others) > QUIET_CORES


def _other_cores(data: Data) -> Sequence[float]:
    """Of all turns that tell what processes used that have nothing to do with it."""
    if isinstance(data, MatrixData):
        cpus: list[Any] = [row.get("cpu") for row in data.rows]
        return [float(cpu["other"]) for cpu in cpus if cpu and "other" in cpu]
    if data.benchmark != "compare":
        # Elsewhere the same name has the benchmark's own kernel threads in it.
        return []
    found = (result.get("other_cores") for result in data.document["results"])
    return [float(value) for value in found if value is not None]


def machine_key(data: Data) -> tuple[object, ...]:
    """Equal for what may stand in one section."""
    record = data.record
    if record is None:
        return ("unknown",)
    return (
        record.get("guest"),
        record["kernel"],
        record["architecture"],
        record["cpu"],
        record["cpus"],
        # The kernel keeps a little more or less of it for itself from boot to boot.
        round(record["memory_bytes"] / GIB),
        BUSY in labels_of(data),
    )


def machine_title(record: Record | None) -> str:
    """ "Linux 6.12, 2 x AMD EPYC" """
    if record is None:
        return "Unknown machine"
    return f"Linux {record['kernel']}, {record['cpus']} × {record['cpu']}"


def machine_details(record: Record) -> Sequence[tuple[str, str]]:
    """What is the same for all of a section, as terms and texts."""
    flags = record.get("cpu_flags") or []
    cpu = str(record["cpu"])
    if flags:
        lacking = [each for each in ("erms", "fsrm") if each not in flags]
        if lacking and record["architecture"] == "x86_64":
            cpu += f", without {', '.join(lacking)} (fast string instructions)"
        if "hypervisor" in flags and not record.get("guest"):
            cpu += ", itself of a virtual machine"
    mitigations = record.get("mitigations") or {}
    found = [
        ("Kernel", f"Linux {record['kernel']} {record['architecture']}"),
        ("CPU", f"{record['cpus']} × {cpu}"),
        ("Memory", format_size(int(record["memory_bytes"]))),
    ]
    if "file_system" in record:
        loops = "direct" if record.get("loop_direct_io") else "buffered"
        found.append(("Images", f"on {record['file_system']}, {loops} loop devices"))
    if mitigations:
        texts = (f"{name}: {state}" for name, state in sorted(mitigations.items()))
        found.append(("Mitigations", "; ".join(texts)))
    return found


def software_line(data: DocumentData | MatrixData) -> str:
    """What may differ between files of one machine: versions, date, load."""
    record = data.record
    if record is None:
        return ""
    revision = record.get("revision")
    words = [f"btrfs-ublk {record.get('btrfs_ublk', '?')}"]
    if revision:
        words[0] += f" ({revision})"
    words += [str(record[x]) for x in ("btrfs_progs", "fio") if record.get(x)]
    load = " ".join(f"{float(value):.2f}" for value in record["load"])
    words.append(f"load {load} when it began, {record.get('time', 'no date')}")
    if record.get("nice"):
        words.append(f"at nice {record['nice']}")
    return ", ".join(words)
