"""Indexes of compressed objects (docs/materialisation.md, "Compressed sources").

Only the helper ``btrfs-ublk-codec`` knows the codecs and the format of an index.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.helpers import CODEC, helper_path
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.process import describe_exit, run, spawn
from btrfs_ublk.content.digests import (
    DEFAULT_UNIT_BYTES,
    Digests,
    check_unit,
    digest_stream,
)
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.new_file import new_file
from btrfs_ublk.units import MIB

#: How far apart points are, where the format lets us choose. Each has up to 32 KiB.
DEFAULT_SPACING_BYTES = MIB
#: Decompressing a large object takes a while.
_TIMEOUT_S = 24 * 3600.0
_END_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Index:
    """What an index says; sizes in bytes. ``size`` is that of what is read,
    ``coded_size`` that of the object."""

    size: int
    coded_size: int
    points: int
    index_size: int


def make_index(
    path: StrPath,
    output: StrPath,
    *,
    codec: str,
    spacing_bytes: int = DEFAULT_SPACING_BYTES,
) -> Index:
    """Make the index of a compressed file: completely, or not at all. Raises
    BtrfsUblkError when the file is not what ``codec`` says, and OSError."""
    with new_file(Path(output), mode=0o644, replace=True, synced=True) as file:
        descriptor = file.fileno()
        done = run(
            [
                *(helper_path(CODEC), "index", codec, str(spacing_bytes)),
                *(Path(path), f"/proc/self/fd/{descriptor}"),
            ],
            timeout_s=_TIMEOUT_S,
            ok_statuses=(0, 1, 2),
            keep_open_fds=[descriptor],
        )
        if done.returncode:
            raise _error(done.stderr)
    return Index(**json.loads(done.stdout))


def digest_indexed(
    path: StrPath,
    index: StrPath,
    *,
    unit_bytes: int = DEFAULT_UNIT_BYTES,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Digests:
    """Compute the digests of what is read of a compressed file, decoded by its index as
    a server does. ``progress`` is called with the number of bytes decoded since the
    last call. Raises BtrfsUblkError, and UsageError for a size that no unit has."""
    check_unit(unit_bytes)
    argv: list[str | Path] = [helper_path(CODEC), "read", Path(index)]
    argv += [str(unit_bytes), Path(path)]
    with spawn(argv, pipe_stdout=True) as child:
        assert child.stdout is not None
        with open(child.stdout.fileno(), "rb", closefd=False) as decoded:
            digests = digest_stream(decoded, unit_bytes, progress)
        status = child.wait(_END_TIMEOUT_S)
        if status != 0:
            text = child.stderr_tail()
            what = "hangs" if status is None else describe_exit(status)
            raise _error(text) if text else BtrfsUblkError(f"{CODEC} {what}")
    return digests


def _error(stderr: str) -> BtrfsUblkError:
    """Make our error of the helper's."""
    text, _, hint = stderr.strip().rpartition(f"{CODEC}: error: ")[2].partition("\n")
    return BtrfsUblkError(text, hint=hint.strip().removeprefix("hint: ") or None)
