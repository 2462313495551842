"""Seeds of the fallocate strategy: btrfs itself lays out a preallocated file, and
btrfs-ublk-seed then turns the file system into a seed, offline.

The kernel's chunks have 1 GiB each, and for each that it begins to fill, its allocator
walks the list of all block groups (find_free_extent(): since Linux 6.2 a new one, of no
size class yet, is only taken in the second pass over the list). So the time grows with
the square of the size: 8 s for 8 TiB, 42 s for 16 TiB. Nothing in mkfs.btrfs, mount
options or /sys/fs/btrfs/FSID/allocation makes such chunks larger. Copies of the
superblock at 64 MiB and 256 GiB interrupt the data, so that only sizes between have
most of the file in one run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import UUID

from btrfs_ublk.base.capabilities import BTRFS, LOOP, MKFS_BTRFS, ROOT, Helper, require
from btrfs_ublk.base.helpers import SEED, helper_path
from btrfs_ublk.base.ledger import Ledger, process_ledger
from btrfs_ublk.base.log import log, step
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.attributes import IMMUTABLE, NO_COW, add_attributes
from btrfs_ublk.kernel.btrfs import (
    create_subvolume,
    forget_device,
    reached_inode,
    set_default_subvolume,
)
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.physmap import PhysicalMap
from btrfs_ublk.seed.inspect import inspect_seed
from btrfs_ublk.seed.layout import (
    DEFAULT_FILENAME,
    SUBVOLUME_NAME,
    Range,
    Seed,
    VirtualData,
)
from btrfs_ublk.units import BLOCK_BYTES, GIB, MIB, format_size

#: The sizes for which 80 % of the file are in one run. For smaller ones, more than a
#: fifth would be in the first chunk's rest behind a superblock. For larger ones, the
#: superblock at 256 GiB cuts the file in two large parts.
MIN_BYTES = 5 * GIB
MAX_BYTES = 300 * GIB

#: Space for chunks that superblock copies cut, so that their last pieces go unused, and
#: for metadata: 200 bytes for each extent of 256 MiB, in chunks of 1 GiB.
_SLACK_BYTES = 16 * GIB

#: The most that the kernel puts into one extent (__btrfs_prealloc_file_range()).
_EXTENT_BYTES = 256 * MIB
#: The size of one allocation: it holds the file's lock, and no signal ends it.
_PIECE_BYTES = 64 * GIB
_DEFAULT_TIMEOUT_S = 900.0
_COMMAND_TIMEOUT_S = 120.0
_MODE = 0o400
_NAME_MAX_BYTES = 255


def make_fallocate_seed(
    path: Path,
    *,
    virtual_data_size: int,
    virtual_data_filename: str = DEFAULT_FILENAME,
    label: str | None = None,
    fsid: UUID | None = None,
    metadata_only: bool = False,
    force: bool = False,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
    ledger: Ledger | None = None,
) -> Seed:
    """Make a seed image with mkfs.btrfs and the kernel's allocator; needs root.

    The virtual file has extents of up to 256 MiB, and a few gaps for copies of the
    superblock and metadata (see Seed.virtual_data), but at least 80 % are in one run.

    ``metadata_only`` cuts the image off after what must be stored. ``force`` replaces
    an existing file. Raises UsageError for invalid arguments, CommandError and
    BtrfsUblkError when a step fails or all of the allocation takes longer than
    ``timeout_s``; the path is unchanged then, and nothing is left behind.
    """
    require(ROOT, BTRFS, LOOP, MKFS_BTRFS, Helper(SEED))
    _check_size(virtual_data_size)
    _check_name(virtual_data_filename)
    _check_output(path, force=force)
    device_bytes = _round_up(virtual_data_size + _SLACK_BYTES, GIB)
    ledger = ledger or process_ledger()
    with ExitStack() as stack:
        # In the same directory, so that a rename makes it the result.
        directory = stack.enter_context(tempdir(parent=path.parent, ledger=ledger))
        image, target = directory / "seed.img", directory / "mount"
        target.mkdir()
        _make_sparse(image, device_bytes, path)
        with step("format it"):
            _format(image, label=label, fsid=fsid)
        with step(f"allocate {format_size(virtual_data_size)}"):
            with _mounted_image(image, target, read_only=False, ledger=ledger):
                inode = _allocate(
                    target,
                    virtual_data_filename,
                    virtual_data_size,
                    deadline_s=time.monotonic() + timeout_s,
                )
                # Users see this subvolume, not the virtual file.
                set_default_subvolume(create_subvolume(target, SUBVOLUME_NAME))
        with step("make it a seed"):
            _flip(image, inode)
            layout = inspect_seed(image)
        with step("validate the map"):
            with _mounted_image(image, target, read_only=True, ledger=ledger):
                with reached_inode(target, inode) as virtual:
                    mapping = PhysicalMap.read(virtual)
            mapping.assert_virtual_data(size_bytes=virtual_data_size, whole=False)
        if metadata_only:
            os.truncate(image, layout["local_bytes"])
        chunks = next(x for x in layout["chunks"] if x["type"] == "DATA")
        seed = Seed(
            path=path,
            fsid=UUID(layout["fsid"]),
            device_uuid=UUID(layout["device_uuid"]),
            label=layout["label"],
            device_bytes=layout["device_bytes"],
            file_bytes=image.stat().st_size,
            metadata_bytes=layout["used_bytes"] - virtual_data_size,
            local_bytes=layout["local_bytes"],
            virtual_data=VirtualData(
                filename=virtual_data_filename,
                inode=inode,
                size=virtual_data_size,
                runs=tuple(mapping.contiguous_runs()),
            ),
            chunks=chunks["count"],
            chunk_bytes=chunks["longest_bytes"],
            strategy="fallocate",
        )
        _publish(image, path, force=force)
    return seed


def _round_up(value: int, step_bytes: int) -> int:
    return -(-value // step_bytes) * step_bytes


def _check_size(size_bytes: int) -> None:
    if size_bytes % BLOCK_BYTES or not MIN_BYTES <= size_bytes <= MAX_BYTES:
        raise UsageError(
            f"virtual data size {size_bytes} is not a multiple of {BLOCK_BYTES} from "
            f"{MIN_BYTES} to {MAX_BYTES} bytes",
            hint="the mega-extent strategy makes seeds of 4 MiB to 8 EiB",
        )


def _check_name(name: str) -> None:
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise UsageError(f"virtual data filename {name!r} is not UTF-8") from None
    if name == SUBVOLUME_NAME:
        raise UsageError(
            f"virtual data filename {name!r} is that of the subvolume beside it"
        )
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UsageError(f"virtual data filename {name!r} is not the name of a file")
    if length > _NAME_MAX_BYTES:
        raise UsageError(
            f"virtual data filename has {length} bytes, the limit is {_NAME_MAX_BYTES}"
        )


def _check_output(path: Path, *, force: bool) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a directory", hint="create it first")
    if path.is_symlink() or path.exists():
        if not path.is_file() or path.is_symlink():
            raise UsageError(f"{path} exists and is not a regular file")
        if not force:
            raise UsageError(
                f"{path} exists", hint="choose another name, or replace it (force)"
            )


def _make_sparse(image: Path, size_bytes: int, path: Path) -> None:
    try:
        with image.open("xb") as file:
            file.truncate(size_bytes)
    except OSError as error:
        raise UsageError(
            f"{path}: no sparse file of {format_size(size_bytes)}: {error.strerror}",
            hint="ext4 stops at 16 TiB: use tmpfs (/dev/shm), XFS or btrfs",
        ) from error


def _format(image: Path, *, label: str | None, fsid: UUID | None) -> None:
    """Make the file system, SINGLE like other seeds: sprouts inherit it."""
    argv: list[str | Path] = ["mkfs.btrfs", "--quiet", "--nodiscard"]
    argv += ["--metadata=single", "--data=single", f"--sectorsize={BLOCK_BYTES}"]
    argv += [f"--uuid={fsid}"] if fsid else []
    argv += [f"--label={label}"] if label else []
    run([*argv, "--", image], timeout_s=_COMMAND_TIMEOUT_S)


def _flip(image: Path, inode: int) -> None:
    run([helper_path(SEED), "flip", str(inode), image], timeout_s=_COMMAND_TIMEOUT_S)


@contextmanager
def _mounted_image(
    image: Path, target: Path, *, read_only: bool, ledger: Ledger
) -> Iterator[None]:
    with ExitStack() as stack:
        loop = stack.enter_context(
            loop_device(image, read_only=read_only, ledger=ledger)
        )
        stack.callback(_forget, loop.path)
        stack.enter_context(
            mounted(
                loop.path,
                target,
                # Discarding blocks that were never written only costs time.
                options=["nodiscard", "noatime", f"device={loop.path}"],
                read_only=read_only,
                ledger=ledger,
            )
        )
        yield


def _forget(device: Path) -> None:
    # Other loop devices will have this image. Failing is harmless.
    try:
        forget_device(device)
    except BtrfsUblkError as error:
        log.debug("%s", error)


def _pieces(size_bytes: int) -> Iterator[Range]:
    """Yield the ranges to allocate, in order, as (offset, length).

    NB: a remainder, of less than the largest extent, comes first, in extents that are
    not small. At the end it would go back into a gap left by a superblock. And since
    Linux 6.2 small and large extents do not share a chunk while another one can be
    made.
    """
    odd_bytes = size_bytes % _EXTENT_BYTES
    heads = [odd_bytes] if odd_bytes else []
    if 0 < odd_bytes < _EXTENT_BYTES // 2 and size_bytes > _EXTENT_BYTES:
        heads = [_EXTENT_BYTES // 2, _EXTENT_BYTES // 2 + odd_bytes]
    offset = 0
    for length_bytes in heads:
        yield offset, length_bytes
        offset += length_bytes
    for start in range(offset, size_bytes, _PIECE_BYTES):
        yield start, min(_PIECE_BYTES, size_bytes - start)


def _allocate(target: Path, name: str, size_bytes: int, *, deadline_s: float) -> int:
    """Make and preallocate the virtual file. Returns its inode number."""
    with open(target / name, "xb", buffering=0) as file:
        fd = file.fileno()
        add_attributes(fd, NO_COW)
        os.fchmod(fd, _MODE)
        for offset, length_bytes in _pieces(size_bytes):
            if time.monotonic() > deadline_s:
                raise BtrfsUblkError(
                    f"allocating {format_size(size_bytes)} takes too long: it is at "
                    f"{format_size(offset)}",
                    hint="use the mega-extent strategy, or a longer timeout",
                )
            try:
                os.posix_fallocate(fd, offset, length_bytes)
            except OSError as error:
                raise BtrfsUblkError(
                    f"cannot allocate [{offset}, {offset + length_bytes}) of the "
                    f"virtual file: {error.strerror}",
                    hint="see the kernel log: dmesg | grep -i btrfs",
                ) from error
        # NB: only now, since an immutable file cannot be allocated.
        add_attributes(fd, IMMUTABLE)
        os.fsync(fd)
        return os.fstat(fd).st_ino


def _publish(image: Path, path: Path, *, force: bool) -> None:
    """Give the image its final name; the temporary one is removed by the caller."""
    try:
        if force:
            os.replace(image, path)
        else:
            os.link(image, path)
    except FileExistsError:
        raise UsageError(f"{path} exists now", hint="choose another name") from None
    except OSError as error:
        raise BtrfsUblkError(f"{path}: {error.strerror}") from error
