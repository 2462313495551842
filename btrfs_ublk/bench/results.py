"""The file of results of a matrix: JSON lines that are only ever appended.

The first line says which matrix it is ("kind": "matrix"), further ones which
environment runs were made in ("environment"), then comes one per run ("run"). A run is
keyed by a hash of its configuration, environment and block, and in the file when its
line is: each is synced to disk. A line without its end, which is what a kill or a crash
leaves, is dropped by the next who opens the file.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from btrfs_ublk.bench.config import configuration_of
from btrfs_ublk.bench.environment import environment_id
from btrfs_ublk.bench.matrices import (
    FORMAT_VERSION,
    MATRICES,
    Matrix,
    check_version,
    run_key,
)
from btrfs_ublk.bench.run import OK, Row
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.log import log

#: What all configurations of a matrix have in common, and options change.
_TOLD = ("front_end", "source", "fio.runtime")
_KINDS = ("matrix", "environment", "run")


class ResultsFile:
    """Made by open_results()."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        #: Of runs, by key; of a key that occurs twice the last.
        self.rows: dict[str, Row] = {}
        self._environments: set[str] = set()

    def append_run(self, row: Row, *, block: int) -> Row:
        """Write a run, and have it on disk. Returns it as it is in the file."""
        key = run_key(
            configuration_of(row), environment=row["environment"], block=block
        )
        line = {"kind": "run", "key": key, "block": block} | row
        self._append(line)
        self.rows[key] = line
        return line

    def note_environment(self, record: Mapping[str, Any]) -> str:
        """Write it unless it is there; its id."""
        name = environment_id(record)
        if name not in self._environments:
            self._append({"kind": "environment", "id": name, **record})
            self._environments.add(name)
        return name

    def _append(self, line: Mapping[str, Any]) -> None:
        data = (json.dumps(line) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot write file of results {self.path}: {error.strerror}",
                hint="make room there; the same command goes on where it was",
            ) from error

    def _read(self, matrix: Matrix, seed: int) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            log.warning(
                "%s: the last line has no end; it is dropped: %r",
                self.path,
                content[whole : whole + 80],
            )
            os.ftruncate(self._fd, whole)
        lines = content[:whole].decode(errors="replace").splitlines()
        if not lines:
            self._append(_header(matrix, seed))
        for number, text in enumerate(lines, start=1):
            self._take(_parse(text, self._where(number)), matrix, seed, number)

    def _take(
        self, line: dict[str, Any], matrix: Matrix, seed: int, number: int
    ) -> None:
        where = self._where(number)
        if (line["kind"] == "matrix") != (number == 1):
            raise UsageError(
                f"{where} is of the kind {line['kind']}",
                hint="a file of results begins with one line of the kind matrix",
            )
        if line["kind"] == "matrix":
            _check_header(line, _header(matrix, seed), where)
        elif line["kind"] == "environment":
            self._environments.add(str(line.get("id")))
        else:
            self.rows[_checked_key(line, matrix, where)] = line

    def _where(self, number: int) -> str:
        return f"{self.path}, line {number}"


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where} is no JSON: {text[:80]!r}") from error
    if not isinstance(line, dict) or line.get("kind") not in _KINDS:
        raise UsageError(
            f"{where} is not of a matrix: {text[:80]!r}",
            hint="name another file, or take the line out",
        )
    return line


def _header(matrix: Matrix, seed: int) -> dict[str, Any]:
    first = matrix.configurations[0].to_dict()
    return {
        "kind": "matrix",
        "version": FORMAT_VERSION,
        "matrix": matrix.name,
        "seed": seed,
        # The fingerprint tells of these as well, but not in words.
        **{key: first[key] for key in _TOLD},
        "fingerprint": matrix.fingerprint(),
        "configurations": len(matrix.configurations),
    }


def _check_header(
    found: Mapping[str, Any], wanted: Mapping[str, Any], where: str
) -> None:
    for name in ("version", "matrix", "seed", *_TOLD, "fingerprint"):
        if found.get(name) != wanted[name]:
            raise UsageError(
                f"{where} is of another matrix: its {name} is {found.get(name)!r}, "
                f"not {wanted[name]!r}",
                hint="give the options that it was begun with, or name another file",
            )


def _checked_key(line: Mapping[str, Any], matrix: Matrix, where: str) -> str:
    """The key of a run, which must be what its line says."""
    try:
        configuration = configuration_of(line)
        key = run_key(
            configuration, environment=line["environment"], block=line["block"]
        )
        status = line["status"]
    except (UsageError, LookupError) as error:
        raise UsageError(f"{where} is not a run: {error}") from error
    if key != line.get("key") or configuration not in matrix.configurations:
        raise UsageError(
            f"{where} is not a run of this matrix: it was changed, or is of another"
        )
    if status == OK and not isinstance(line.get("total_iops"), int | float):
        raise UsageError(f"{where} has the status {status} and no total_iops")
    return key


@contextmanager
def open_results(path: Path, matrix: Matrix, *, seed: int) -> Iterator[ResultsFile]:
    """Begin a file of results, or go on with it.

    Raises UsageError, naming the line, for what is not of this matrix and seed; and
    when another process writes the file.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(f"file of results {path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BtrfsUblkError(
                f"{path} is being written by another process"
            ) from None
        _sync_directory(path)
        results = ResultsFile(path, fd)
        results._read(matrix, seed)
        yield results
    finally:
        os.close(fd)


def check_results(text: str, name: str) -> dict[str, Any] | None:
    """Check the content of a file of results, all lines of it but a last one that has
    no end. Returns the line for the matrix; None where there is none, as the lines are
    bare runs.

    Raises UsageError, naming ``name`` and the line: for a matrix that there is not, or
    of another version, and for runs that are not of it.
    """
    lines = text.split("\n")[:-1]
    if not lines or not _is_header(lines[0]):
        return None
    header = _parse(lines[0], f"{name}, line 1")
    matrix = _matrix_of(header, f"{name}, line 1")
    for number, line in enumerate(lines[1:], start=2):
        where = f"{name}, line {number}"
        if not line.strip():
            continue
        found = _parse(line, where)
        if found["kind"] == "matrix":
            raise UsageError(
                f"{where} is of the kind matrix",
                hint="one file of results has the runs of one matrix",
            )
        if found["kind"] == "run":
            _checked_key(found, matrix, where)
    return header


def _is_header(text: str) -> bool:
    try:
        line = json.loads(text)
    except ValueError:
        return False
    return isinstance(line, dict) and line.get("kind") == "matrix"


def _matrix_of(header: Mapping[str, Any], where: str) -> Matrix:
    """The matrix that a file says it is of."""
    check_version(header, where)
    name = str(header.get("matrix"))
    if name not in MATRICES:
        raise UsageError(
            f"{where} is of a matrix that there is not: {name!r}",
            hint=f"known: {', '.join(MATRICES)}",
        )
    try:
        matrix = MATRICES[name].with_options(
            front_end=header["front_end"],
            source=header["source"],
            runtime_s=header["fio.runtime"],
        )
    except KeyError as error:
        raise UsageError(f"{where} has no {error}") from error
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from error
    if header.get("fingerprint") != matrix.fingerprint():
        raise UsageError(
            f"{where} is of another matrix that was called {name}",
            hint="use the version of btrfs-ublk that wrote it",
        )
    return matrix


def _sync_directory(path: Path) -> None:
    """A new file's name is on disk when its directory is."""
    directory = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
