"""The check of a seed image by btrfs-progs, offline."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.capabilities import BTRFS_PROGS
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.seed.inspect import TIMEOUT_S, inspect_seed
from btrfs_ublk.units import MIB, format_size

#: More stored data than this is not copied into memory for ``btrfs check``.
_COPY_BYTES_MAX = 1024 * MIB
_OUTPUT_LINES = 30


@dataclass(frozen=True)
class ProgsReport:
    """The result of ``btrfs check``. ``clean`` is None when it did not run, for
    ``reason``. ``output`` has the last lines of a check that failed.
    """

    clean: bool | None
    reason: str | None = None
    output: tuple[str, ...] = ()


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
        run(
            ["cp", "--sparse=always", path, f"/proc/self/fd/{fd}"],
            timeout_s=TIMEOUT_S,
            keep_open_fds=[fd],
        )
        os.ftruncate(fd, size_bytes)
        yield fd
    finally:
        os.close(fd)
