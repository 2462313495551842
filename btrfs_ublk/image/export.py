"""Reading the tree of a sealed image without a mount: as a tar."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from btrfs_ublk.base.helpers import READIMAGE, helper_path
from btrfs_ublk.base.process import Child, spawn
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.check import Progress, assembled_image
from btrfs_ublk.image.documents import InvalidImageError
from btrfs_ublk.image.pack import Layer, PackHeader
from btrfs_ublk.image.reference import Name
from btrfs_ublk.units import MIB

#: A bound for what would otherwise wait for ever.
_TIMEOUT_S = 86400.0
_COPY_BYTES = MIB


@dataclass(frozen=True)
class ExportReport:
    """What was exported. ``remark`` says what a tar could not hold."""

    chain_id: str
    tar_bytes: int
    remark: str | None = None


def export_image(
    name: Name,
    access: RegistryAccess,
    out: IO[bytes],
    *,
    layer: str | None = None,
    directory: Path | None = None,
    expect: Progress = lambda total: None,
    progress: Progress = lambda count: None,
    say: Callable[[str], object] = lambda text: None,
) -> ExportReport:
    """Write a sealed image as a tar, after all of it was compared with its digests: the
    tree after the layer with the chain ID ``layer``, or after the last. Equal trees
    make equal bytes. No privileges are needed.

    The other arguments are those of check_image(). Raises InvalidImageError, what
    check_image() raises, and BtrfsUblkError when ``out`` cannot be written.
    """
    helper = helper_path(READIMAGE)
    with assembled_image(
        name, access, directory=directory, expect=expect, progress=progress
    ) as image:
        say("write the tar")
        chosen = _layer(image.header, layer)
        return _write(helper, image.whole, chosen, out)


def _layer(header: PackHeader, chain_id: str | None) -> Layer:
    for layer in reversed(header.layers):
        if chain_id in (None, layer.chain_id):
            return layer
    raise UsageError(
        f"the image has no layer {chain_id!r}",
        hint="btrfs-ublk image inspect lists its layers",
    )


def _write(helper: Path, whole: Path, layer: Layer, out: IO[bytes]) -> ExportReport:
    tar_bytes = 0
    argv: list[str | Path] = [helper, "tar", str(layer.subvolume), whole]
    with spawn(argv, pipe_stdout=True) as child:
        assert child.stdout is not None
        while part := os.read(child.stdout.fileno(), _COPY_BYTES):
            tar_bytes += len(part)
            view = memoryview(part)
            try:
                while view:
                    view = view[out.write(view) :]
            except BrokenPipeError:
                raise  # whoever has read enough, as head(1), is told nothing
            except OSError as error:
                raise _unwritten(out.name, error) from error
        said = finished(child, whole)
    remark = said.partition(": warning: ")[2] or None
    return ExportReport(layer.chain_id, tar_bytes, remark)


def finished(child: Child, whole: Path) -> str:
    """Wait for the helper, and return what it said. Raises InvalidImageError."""
    status = child.wait(_TIMEOUT_S)
    said = child.stderr_tail().strip()
    if status != 0:
        words = said.partition(": error: ")[2] or said or f"{READIMAGE}: {status}"
        raise InvalidImageError(words.replace(str(whole), "the image"))
    return said


def _unwritten(name: object, error: OSError) -> BtrfsUblkError:
    return BtrfsUblkError(f"cannot write {name}: {error.strerror or error}")
