"""Files of results, read and checked: matrices, bare runs, documents of benchmarks."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from btrfs_ublk.bench.report import Document, Table, tables_of
from btrfs_ublk.bench.results import check_results
from btrfs_ublk.bench.summarize import parse_rows
from btrfs_ublk.errors import UsageError
from btrfs_ublk.log import log

Record = Mapping[str, Any]
Row = dict[str, Any]

_DOCUMENT_VERSION = 1
#: Of a file; whatever is larger is no file of results.
_MAX_BYTES = 512 << 20


@dataclass(frozen=True)
class DocumentData:
    """What a benchmark printed with --json."""

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
    bare runs, which say nothing about either.
    """

    name: str
    header: Record | None
    record: Record | None
    rows: Sequence[Row]


Data = DocumentData | MatrixData


def read_inputs(paths: Sequence[Path]) -> list[Data]:
    """All that is in the files, in their order.

    Raises UsageError, naming file and line, for what is not of a benchmark.
    """
    found: list[Data] = []
    for path in paths:
        try:
            found += _read(path)
        except UsageError:
            raise
        except RecursionError as error:
            raise UsageError(f"{path} is nested too deeply for results") from error
        except Exception as error:  # whatever a changed file makes of pure functions
            raise UsageError(
                f"{path} does not hold what a benchmark writes: "
                f"{type(error).__name__}: {error}"
            ) from error
    return found


def _read(path: Path) -> list[Data]:
    name = clean(path.name)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is too large for a file of results")
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}, line {line} is no text (UTF-8)") from error
    if not text.strip():
        raise UsageError(
            f"{path} is empty", hint="give a file that a benchmark has written"
        )
    first = _first_object(text)
    if first is not None and {"benchmark", "results"} & first.keys():
        return [_document(path, name, first)]
    if first is None and text.lstrip().startswith("{") and '"benchmark"' in text[:4096]:
        _refuse_torn(path, text)
    return _matrix(path, name, text)


def _first_object(text: str) -> Row | None:
    """The file as one JSON object, or None."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _refuse_torn(path: Path, text: str) -> NoReturn:
    try:
        json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}, line {error.lineno} is no JSON: {error.msg}",
            hint="it may have been cut off; make it anew",
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    raise UsageError(f"{path} is no JSON object")


def _document(path: Path, name: str, document: Document) -> DocumentData:
    missing = {"benchmark", "environment", "results", "version"} - document.keys()
    if missing:
        raise UsageError(
            f"{path}, line 1 is not what a benchmark printed: it has no "
            f"{', '.join(sorted(missing))}"
        )
    if document["version"] != _DOCUMENT_VERSION:
        raise UsageError(
            f"{path}, line 1 is of version {document['version']!r}, not "
            f"{_DOCUMENT_VERSION}",
            hint="make it anew, or use the version of btrfs-ublk that it is from",
        )
    document = cleaned(document)
    document.setdefault("parameters", {})
    _check_environment(document["environment"], str(path))
    try:
        tables = tables_of(document)
    except UsageError as error:
        raise UsageError(f"{path}, line 1: {error.message}", hint=error.hint) from error
    except Exception as error:  # whatever a foreign document makes of pure functions
        raise UsageError(
            f"{path} is not what the benchmark {document['benchmark']} makes: "
            f"{type(error).__name__}: {error}",
            hint="it is of another version, or was changed",
        ) from error
    return DocumentData(name, document, tables)


def _check_environment(record: object, where: str) -> None:
    wanted: dict[str, type | tuple[type, ...]] = {
        "kernel": str,
        "architecture": str,
        "cpu": str,
        "cpus": int,
        "memory_bytes": (int, float),
        "load": list,
    }
    for key, kind in wanted.items():
        if not isinstance(record, dict) or not isinstance(record.get(key), kind):
            raise UsageError(f"{where}: its environment has no {key}, or a wrong one")


def _matrix(path: Path, name: str, text: str) -> list[Data]:
    try:
        parsed = parse_rows(text)
        header = check_results(text, str(path))
    except UsageError as error:
        if error.message.startswith("line "):
            raise UsageError(f"{path}, {error.message}", hint=error.hint) from error
        if error.message.startswith("there is no run"):
            raise UsageError(_no_run(path, text)) from error
        raise
    if parsed.torn:
        lines = len(text.split("\n"))
        log.warning("%s, line %d has no end; it is left out", path, lines)
    by_environment: dict[str, list[Row]] = {}
    for row in parsed.rows:
        place = str(row.get("environment", ""))
        by_environment.setdefault(place, []).append(cleaned(row))
    made: list[Data] = []
    for environment, rows in by_environment.items():
        record = parsed.environments.get(environment)
        if record is not None:
            record = cleaned(dict(record))
            _check_environment(record, f"{path}, environment {environment}")
        made.append(MatrixData(name, cleaned(header), record, rows))
    return made


def _no_run(path: Path, text: str) -> str:
    lines = text.split("\n")
    if lines[-1].strip():
        return f"{path} has no run; line {len(lines)} has no end: {lines[-1][:80]!r}"
    return f"{path} has no run"


def cleaned(value: Any) -> Any:
    """The same without what no text on a page may hold; see clean()."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [cleaned(each) for each in value]
    if isinstance(value, dict):
        return {clean(str(key)): cleaned(each) for key, each in value.items()}
    return value


def clean(text: str) -> str:
    """Without control characters, which XML does not allow, and without those that turn
    the direction of what follows, or are not seen; a mark stands in their places.
    """
    return "".join(
        "\ufffd" if unicodedata.category(each)[0] == "C" and each != "\n" else each
        for each in text
    )
