"""Checks of a seed image offline: our own, and that of btrfs-progs."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from btrfs_ublk.base.capabilities import BTRFS_PROGS
from btrfs_ublk.base.helpers import CHECKSEED, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.seed.inspect import TIMEOUT_S, helper_error, inspect_seed
from btrfs_ublk.units import MIB, format_size

#: More stored data than this is not copied into memory for ``btrfs check``.
_COPY_BYTES_MAX = 1024 * MIB
_OUTPUT_LINES = 30


@dataclass(frozen=True)
class Violation:
    """``rule`` is one of a fixed set (csrc/btrfs/check/report.h); ``text`` names the
    structure and the value.
    """

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass(frozen=True)
class SeedReport:
    """The result of our check. ``violations`` holds the first 1000 of
    ``violation_count``, ``notes`` what could not be checked.
    """

    path: Path
    clean: bool
    seeding: bool
    strategy: str
    violation_count: int
    violations: tuple[Violation, ...]
    notes: tuple[str, ...]
    tree_blocks: int

    @classmethod
    def from_json(cls, text: str) -> SeedReport:
        """Parse ``btrfs-ublk-checkseed check --json``. Raises BtrfsUblkError."""
        try:
            keys = json.loads(text)
            keys["path"] = Path(keys["path"])
            keys["violations"] = tuple(Violation(**v) for v in keys["violations"])
            keys["notes"] = tuple(keys["notes"])
            return cls(**keys)
        except (ValueError, KeyError, TypeError) as error:
            raise BtrfsUblkError(
                f"{CHECKSEED} makes no report ({error!r}): {text[:200]!r}",
                hint="build package and helpers from one version",
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """What fits in JSON."""
        return asdict(self) | {"path": str(self.path)}


@dataclass(frozen=True)
class ProgsReport:
    """The result of ``btrfs check``. ``clean`` is None when it did not run, for
    ``reason``. ``output`` has the last lines of a check that failed.
    """

    clean: bool | None
    reason: str | None = None
    output: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """What fits in JSON."""
        return asdict(self)


def check_seed(path: Path) -> SeedReport:
    """Check an image or an unmounted block device; writes nothing, needs no privileges.

    Raises BtrfsUblkError when it cannot be opened or is mounted. Anything else, even
    that there is no btrfs, is a violation.
    """
    argv: list[str | Path] = [helper_path(CHECKSEED), "check", path]
    done = run(argv, timeout_s=TIMEOUT_S, ok_statuses=(0, 1))
    if not done.stdout:
        raise helper_error(done.stderr)
    return SeedReport.from_json(done.stdout)


def check_with_progs(path: Path) -> ProgsReport:
    """Run ``btrfs check --readonly``; an image that ends early is copied to full size.

    The copy has the same holes and is in memory, where sparse files of any size are
    possible. Raises CommandError when the check takes too long.
    """
    missing = BTRFS_PROGS.probe()
    if missing is not None:
        return ProgsReport(None, f"{missing}: {BTRFS_PROGS.hint}")
    try:
        layout = inspect_seed(path)
    except BtrfsUblkError as error:
        return ProgsReport(None, f"the layout cannot be read: {error.message}")
    if layout["file_bytes"] >= layout["device_bytes"]:
        return _run_progs(path)
    status = path.stat()
    if stat.S_ISBLK(status.st_mode):
        return ProgsReport(None, "the device is smaller than the file system on it")
    stored_bytes = status.st_blocks * 512
    if stored_bytes > _COPY_BYTES_MAX:
        return ProgsReport(
            None,
            "the image ends early, and a copy of full size would take "
            f"{format_size(stored_bytes)} of memory",
        )
    with _full_size_copy(path, layout["device_bytes"]) as fd:
        return _run_progs(Path(f"/proc/self/fd/{fd}"), keep_open_fd=fd)


def _run_progs(path: Path, *, keep_open_fd: int | None = None) -> ProgsReport:
    done = run(
        ["btrfs", "check", "--readonly", path],
        timeout_s=TIMEOUT_S,
        ok_statuses=range(256),
        keep_open_fds=[] if keep_open_fd is None else [keep_open_fd],
    )
    if done.returncode == 0:
        return ProgsReport(True)
    lines = (done.stdout + done.stderr).splitlines()
    return ProgsReport(
        False,
        f"btrfs check exited with status {done.returncode}",
        tuple(lines[-_OUTPUT_LINES:]),
    )


@contextmanager
def _full_size_copy(path: Path, size_bytes: int) -> Iterator[int]:
    fd = os.memfd_create("btrfs-ublk-seed")
    try:
        os.ftruncate(fd, size_bytes)
        with path.open("rb", buffering=0) as file:
            for offset, length in _stored_ranges(file.fileno()):
                while length:
                    data = os.pread(file.fileno(), min(length, MIB), offset)
                    if not data:
                        break
                    os.pwrite(fd, data, offset)
                    offset += len(data)
                    length -= len(data)
        yield fd
    finally:
        os.close(fd)


def _stored_ranges(fd: int) -> Iterator[tuple[int, int]]:
    """Yield the (offset, length) of all data of a file (lseek(2), SEEK_DATA)."""
    end = os.fstat(fd).st_size
    offset = 0
    while offset < end:
        try:
            offset = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:
            return
        hole = os.lseek(fd, offset, os.SEEK_HOLE)
        yield offset, hole - offset
        offset = hole
