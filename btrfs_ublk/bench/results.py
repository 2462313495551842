"""The file of results of a matrix: JSON lines that are only ever appended.

The first line names the matrix ("kind": "matrix"). Others describe an environment that
runs were made in ("environment"), or one run ("run"). A run's key is a hash of its
configuration, environment and block. Each line is synced to disk. A line without its
end, left by a kill or a crash, is dropped by the next process that opens the file.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from btrfs_ublk.base.jsonfile import sync
from btrfs_ublk.base.log import log
from btrfs_ublk.bench.config import configuration_of
from btrfs_ublk.bench.environment import environment_id
from btrfs_ublk.bench.matrices import FORMAT_VERSION, Matrix, run_key
from btrfs_ublk.bench.run import OK, Row
from btrfs_ublk.errors import BtrfsUblkError, UsageError

#: Keys that all configurations of a matrix share, and that options change.
_TOLD = ("front_end", "source", "fio.runtime")
_KINDS = ("matrix", "environment", "run")


class ResultsFile:
    """A file of results, made by open_results()."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        #: The runs by key; the last one for a repeated key.
        self.rows: dict[str, Row] = {}
        self._environments: set[str] = set()

    def append_run(self, row: Row, *, block: int) -> Row:
        """Write a run, and sync it. Returns it as it is in the file."""
        key = run_key(
            configuration_of(row), environment=row["environment"], block=block
        )
        line = {"kind": "run", "key": key, "block": block} | row
        self._append(line)
        self.rows[key] = line
        return line

    def note_environment(self, record: Mapping[str, Any]) -> str:
        """Write an environment unless it is there; returns its id."""
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
            where = f"{self.path}, line {number}"
            if number > 1 and not text.strip():
                continue
            line = _parse(text, where)
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
                _check_run(line, matrix, where)
                self.rows[line["key"]] = line


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
        # The fingerprint covers these as well, but not readably.
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


def _check_run(line: Mapping[str, Any], matrix: Matrix, where: str) -> None:
    """Raise UsageError unless the key matches the line."""
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


@contextmanager
def open_results(path: Path, matrix: Matrix, *, seed: int) -> Iterator[ResultsFile]:
    """Begin a file of results, or resume it.

    Raises UsageError, naming the line, for data of another matrix or seed, and
    BtrfsUblkError when another process writes the file.
    """
    try:
        # NB: no symbolic links: one of another user may lead to a missing file.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o644)
    except OSError as error:
        raise UsageError(f"file of results {path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BtrfsUblkError(
                f"{path} is being written by another process"
            ) from None
        sync(path.absolute().parent)  # so that a new file's name is on disk
        results = ResultsFile(path, fd)
        results._read(matrix, seed)
        yield results
    finally:
        os.close(fd)
