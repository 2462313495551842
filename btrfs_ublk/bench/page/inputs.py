"""Files of results, read and checked: matrices, bare runs, documents of benchmarks;
the kind of machine that they are from, and whether they are reliable.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from btrfs_ublk.base.log import log
from btrfs_ublk.bench.environment import QUIET_CORES
from btrfs_ublk.bench.report import Document, Table, tables_of
from btrfs_ublk.bench.stats import grouped
from btrfs_ublk.bench.summarize import parse_rows
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import GIB

Record = Mapping[str, Any]
Row = dict[str, Any]

_DOCUMENT_VERSION = 1
#: The largest size of a file of results.
_MAX_BYTES = 512 << 20
#: Keys that an environment must have, and their types; _KNOWN ones may be None.
_NEEDED: dict[str, Any] = {
    **{"kernel": str, "architecture": str, "cpu": str, "cpus": int},
    **{"memory_bytes": (int, float), "load": list},
}
_KNOWN: dict[str, Any] = {"cpu_flags": list, "mitigations": dict}

#: If more tasks than this per CPU run in the median turn, others are running.
BUSY_LOAD = 3.0
#: Kinds by a record's "guest". Results of real machines are shown before those of
#: emulated ones.
_KINDS = {None: "native", "kvm": "vm", "icount": "icount", "tcg": "emulated"}
_ORDER = [*_KINDS.values(), "unknown"]


@dataclass(frozen=True)
class DocumentData:
    """The document that a benchmark printed with --json."""

    name: str
    document: Document
    tables: Sequence[Table]

    @property
    def benchmark(self) -> str:
        return str(self.document["benchmark"])

    @property
    def record(self) -> Record:
        record: Record = self.document["environment"]
        return record


@dataclass(frozen=True)
class MatrixData:
    """The runs of one environment in a file. ``header`` and ``record`` are None for
    bare runs, which have neither.
    """

    name: str
    header: Record | None
    record: Record | None
    rows: Sequence[Row]
    benchmark: str = "matrix"


Data = DocumentData | MatrixData


@contextmanager
def naming(where: object) -> Iterator[None]:
    """Turn any error that an altered file causes in pure functions into a UsageError
    that names the file.
    """
    try:
        yield
    except UsageError as error:
        if str(where) in error.message:
            raise
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error
    except Exception as error:
        raise UsageError(
            f"{where} does not hold what its benchmark writes: "
            f"{type(error).__name__}: {error}",
            hint="it is of another version, or was changed",
        ) from error


def read_inputs(paths: Sequence[Path]) -> list[Data]:
    """Read all files, in order.

    Raises UsageError, naming file and line, for what no benchmark wrote.
    """
    found: list[Data] = []
    for path in paths:
        with naming(path):
            found += _read(path)
    return found


def _read(path: Path) -> Sequence[Data]:
    name = clean(path.name)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError("it is too large for a file of results")
        text = path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"line {line} is no text (UTF-8)") from error
    if not text.strip():
        raise UsageError("it is empty", hint="give a file that a benchmark has written")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        if text.lstrip().startswith("{") and '"benchmark"' in text[:4096]:
            line = getattr(error, "lineno", 1)
            raise UsageError(
                f"line {line} is no JSON: {error}",
                hint="it may have been cut off; make it anew",
            ) from error
        value = None
    if isinstance(value, dict) and {"benchmark", "results"} & value.keys():
        return [_document(name, cleaned(value))]
    return list(_matrices(path, name, text))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _document(name: str, document: Document) -> DocumentData:
    missing = {"benchmark", "environment", "results", "version"} - document.keys()
    if missing:
        raise UsageError(
            "it is not what a benchmark printed: it has no "
            f"{', '.join(sorted(missing))}"
        )
    if document["version"] != _DOCUMENT_VERSION:
        raise UsageError(
            f"it is of version {document['version']!r}, not {_DOCUMENT_VERSION}",
            hint="make it anew, or use the version of btrfs-ublk that it is from",
        )
    document.setdefault("parameters", {})
    _check_environment(document["environment"])
    return DocumentData(name, document, tables_of(document))


def _check_environment(record: object) -> None:
    for key, kind in _NEEDED.items():
        if not isinstance(record, dict) or not isinstance(record.get(key), kind):
            raise UsageError(f"its environment has no {key}, or a wrong one")
    assert isinstance(record, dict)
    for key, other in _KNOWN.items():
        if not isinstance(record.get(key) or other(), other):
            raise UsageError(f"its environment has a wrong {key}")
    if not all(isinstance(each, int | float) for each in record["load"]):
        raise UsageError("its environment has a load that is no number")


def _matrices(path: Path, name: str, text: str) -> Iterator[MatrixData]:
    parsed = parse_rows(text)
    if parsed.torn:
        lines = len(text.split("\n"))
        log.warning("%s, line %d has no end; it is left out", path, lines)
    places = grouped(parsed.rows, lambda row: str(row.get("environment", "")))
    for environment, rows in places.items():
        record = cleaned(parsed.environments.get(environment))
        if record is not None:
            _check_environment(record)
        yield MatrixData(name, cleaned(parsed.header), record, cleaned(rows))


def cleaned(value: Any) -> Any:
    """Return a value with all its text cleaned; see clean()."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [cleaned(each) for each in value]
    if isinstance(value, dict):
        return {clean(str(key)): cleaned(each) for key, each in value.items()}
    return value


def clean(text: str) -> str:
    """Replace control characters, which XML does not allow, and characters that change
    the direction of text or are invisible.
    """
    return "".join(
        "\ufffd" if unicodedata.category(each)[0] == "C" and each != "\n" else each
        for each in text
    )


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
    if isinstance(data, MatrixData):
        others = [(row.get("cpu") or {}).get("other") for row in data.rows]
        loads = []
    else:
        results = data.document["results"]
        others = [result.get("other_cores") for result in results]
        # What fio runs is a load of its own, so that of its turns says nothing.
        compared = data.benchmark == "compare"
        loads = [] if compared else [result.get("load") for result in results]
    if record is not None:
        loads = [x for x in loads if x is not None] or record["load"][:1]
        if loads and median(map(float, loads)) > BUSY_LOAD * int(record["cpus"]):
            return True
    told = [float(str(value)) for value in others if value is not None]
    return bool(told) and median(told) > QUIET_CORES


def machine_key(data: Data) -> tuple[object, ...]:
    """Return a key that is equal for data of one section."""
    record = data.record
    if record is None:
        return ("unknown",)
    keys = ("guest", "kernel", "architecture", "cpu", "cpus")
    # The kernel reserves a slightly different amount in each boot.
    memory = round(record["memory_bytes"] / GIB)
    return *(record.get(key) for key in keys), memory, "busy" in labels_of(data)
