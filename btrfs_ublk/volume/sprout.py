"""A sprout: a mounted seed with a writable device added, which takes all writes."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from uuid import UUID

from btrfs_ublk import physmap
from btrfs_ublk import seed as seeds
from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, require
from btrfs_ublk.base.ledger import Ledger, process_ledger
from btrfs_ublk.base.log import log, step
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError, CommandError, UsageError
from btrfs_ublk.kernel import blockdev
from btrfs_ublk.kernel.btrfs import (
    MIN_WRITABLE_BYTES,
    add_device,
    filesystem_uuid,
    reached_inode,
)
from btrfs_ublk.kernel.loop import LoopDevice, loop_device
from btrfs_ublk.kernel.mount import Mount, mounted, remount
from btrfs_ublk.kernel.read_ahead import check_read_ahead, set_read_ahead
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.units import exact_size
from btrfs_ublk.volume.definition import (
    DEFAULT_READ_AHEAD_BYTES,
    DEFAULT_WRITABLE_BYTES,
)
from btrfs_ublk.volume.mounts import forget

#: How long another seed of the same fsid may take to become a sprout.
_OTHER_SEED_TIMEOUT_S = 10.0
_OTHER_SEED_POLL_S = 0.05


@dataclass(frozen=True)
class Sprout:
    """A mounted sprout."""

    mount: Mount
    seed_device: Path
    writable: LoopDevice
    seed_fsid: UUID
    fsid: UUID

    @property
    def target(self) -> Path:
        return self.mount.target


@contextmanager
def sprout(
    seed_device: StrPath,
    target: StrPath,
    *,
    writable_file: StrPath | None = None,
    writable_bytes: int = DEFAULT_WRITABLE_BYTES,
    parent: StrPath | None = None,
    options: Sequence[str] = (),
    validate: Callable[[Path], object] | None = None,
    made: Callable[[Path, UUID], object] | None = None,
    direct_io: bool = False,
    lifeline: bool = False,
    read_ahead_bytes: int | None = DEFAULT_READ_AHEAD_BYTES,
    ledger: Ledger | None = None,
) -> Iterator[Sprout]:
    """Mount a seed, add a writable loop device, make the mount writable. Nobody sees it
    at ``target`` before all of that is done.

    ``writable_file`` backs that device; its content is lost. Without it, a sparse file
    of ``writable_bytes`` is made in a temporary directory below ``parent``, and removed
    at the end. ``options`` are further mount options. ``validate`` is called with a
    path to the untouched, read-only seed; when it raises, nothing is added. ``made`` is
    called with a path to the sprout, and its fsid, before others see it. ``lifeline``
    is as for loop_device().
    ``read_ahead_bytes`` is what one page fault fetches (see docs/limits.md); None
    leaves it at btrfs' own 4 MiB, and so does the default where /sys is read-only.
    Unmounts and detaches in order at the end; after an error at any step, everything
    made until then is undone.
    """
    require(ROOT, BTRFS, LOOP)
    ledger = ledger or process_ledger()
    if read_ahead_bytes is not None:
        check_read_ahead(read_ahead_bytes)
    seed_device = Path(seed_device)
    blockdev.device_number(seed_device)
    with ExitStack() as stack:
        if writable_file is None:
            directory = stack.enter_context(tempdir(parent=parent, ledger=ledger))
            writable_file = directory / "writable.img"
            make_writable_file(writable_file, writable_bytes)
        writable_file = Path(writable_file)
        _check_size(writable_file)
        writable = stack.enter_context(
            loop_device(
                writable_file, direct_io=direct_io, lifeline=lifeline, ledger=ledger
            )
        )
        # Each sprout has a new fsid, and the kernel's list of them would grow.
        stack.callback(_forget, writable.path, ledger)
        fsids: list[UUID] = []

        def grow(at: Path) -> None:
            fsids[:] = _grow(at, seed_device, writable.path, validate, ledger)
            if made is not None:
                made(at, fsids[1])

        with step(f"mount seed {seed_device}"):
            mount = _mount_seed(
                *(stack, seed_device, target, options, ledger),
                added=[writable.path],
                prepare=grow,
            )
        apply_read_ahead(mount.target, read_ahead_bytes)
        yield Sprout(mount, seed_device, writable, *fsids)


def _grow(
    at: Path,
    seed_device: Path,
    writable: Path,
    validate: Callable[[Path], object] | None,
    ledger: Ledger,
) -> tuple[UUID, UUID]:
    """Make a sprout of a mounted seed; return the fsid of both."""
    seed_fsid = filesystem_uuid(at)
    if validate is not None:
        with step("validate the seed"):
            validate(at)
    with step(f"add {writable}"):
        add_device(at, writable, ledger=ledger)
    fsid = filesystem_uuid(at)
    if fsid == seed_fsid:
        raise UsageError(
            f"the btrfs on {seed_device} is no seed: it took the device and kept "
            f"its fsid {fsid}",
            hint="make it a seed while unmounted: btrfstune -S 1",
        )
    with step("remount rw"):
        remount(at, options=["rw"])
    return seed_fsid, fsid


def _mount_seed(
    stack: ExitStack,
    seed_device: Path,
    target: StrPath,
    options: Sequence[str],
    ledger: Ledger,
    *,
    added: Sequence[Path],
    prepare: Callable[[Path], object],
) -> Mount:
    """The kernel refuses a seed while another device of its fsid is mounted as a seed:
    volumes of one image that come up at once. It takes it when that one has become a
    sprout, whose fsid is its own (device_list_add() in fs/btrfs/volumes.c: EEXIST).
    """
    deadline_s = time.monotonic() + _OTHER_SEED_TIMEOUT_S
    while True:
        try:
            return stack.enter_context(
                mounted(
                    seed_device,
                    target,
                    # Only this option finds a seed that was never scanned.
                    options=[f"device={seed_device}", *options],
                    read_only=True,
                    prepare=prepare,
                    added=added,
                    ledger=ledger,
                )
            )
        except CommandError as error:
            if (
                os.strerror(errno.EEXIST) not in str(error)
                or time.monotonic() > deadline_s
            ):
                raise
        time.sleep(_OTHER_SEED_POLL_S)


def apply_read_ahead(target: Path, read_ahead_bytes: int | None) -> None:
    """Set the read-ahead of a mounted sprout; None leaves it as it is.

    If this process may not write to /sys, as in containers, the default value only
    causes a warning. Raises as set_read_ahead() does.
    """
    if read_ahead_bytes is None:
        return
    try:
        set_read_ahead(target, read_ahead_bytes)
    except CapabilityError as error:
        if read_ahead_bytes != DEFAULT_READ_AHEAD_BYTES:
            raise
        log.warning("read-ahead stays the kernel's: %s", error.message)


def make_writable_file(path: Path, size_bytes: int) -> None:
    """Make a sparse file for written data. Raises BtrfsUblkError."""
    try:
        path.touch(mode=0o600, exist_ok=False)
        os.truncate(path, size_bytes)
    except OSError as error:
        hint = "is its disk full, or read-only?"
        if error.errno == errno.EFBIG:
            hint = (
                "its file system, or ulimit -f, ends files before that (ext4: at 16T); "
                "take less, or a directory (--base, parent=) on XFS or btrfs"
            )
        raise BtrfsUblkError(
            f"cannot make {path} of {exact_size(size_bytes)}: {error.strerror}",
            hint=hint,
        ) from error


def _check_size(path: Path) -> None:
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise UsageError(f"writable file {path}: {error.strerror}") from error
    if size_bytes < MIN_WRITABLE_BYTES:
        raise UsageError(
            f"writable file {path} has {size_bytes} bytes, btrfs needs "
            f"{MIN_WRITABLE_BYTES} at least"
        )


def _forget(device: Path, ledger: Ledger) -> None:
    if ledger.is_ours:  # else the mount stays
        forget(device)


def virtual_file_of(seed: seeds.Seed, target: StrPath) -> AbstractContextManager[Path]:
    """Yield a path of a seed's virtual file, valid within the block, to clone from.

    ``target`` is where the seed, or a sprout of it, is mounted. The file is in no
    directory, as programs that walk a tree would read all of it. Raises BtrfsUblkError;
    needs root.
    """
    return reached_inode(target, seed.virtual_data.inode)


def assert_mapping(seed: seeds.Seed, target: Path) -> physmap.PhysicalMap:
    """Prove that the kernel maps the virtual file to where the server answers it.

    ``target`` is where the seed is mounted. Raises MappingError, which names the row
    and the rule, when any byte of the file would be read from elsewhere, which would be
    silent corruption.
    """
    virtual = seed.virtual_data
    with virtual_file_of(seed, target) as path:
        mapping = physmap.PhysicalMap.read(path)
    virtual.assert_matches(mapping)
    return mapping
