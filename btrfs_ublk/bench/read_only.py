"""Read-only file systems of a directory: EROFS, overlayfs on it, composefs. Peers, and
what is listed, are mounted by these.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from btrfs_ublk.capabilities import FileSystem, Program
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.process import run
from btrfs_ublk.resources.loop import loop_device
from btrfs_ublk.resources.mount import mounted

EROFS = FileSystem("erofs")
OVERLAY = FileSystem("overlay")
EXT4 = FileSystem("ext4")
MKFS_EROFS = Program("mkfs.erofs", "erofs-utils")
MKCOMPOSEFS = Program("mkcomposefs", "composefs")
MOUNT_COMPOSEFS = Program("mount.composefs", "composefs")

MKFS_EXT4 = Program("mkfs.ext4", "e2fsprogs")

_MKFS_TIMEOUT_S = 300.0
_HOSTED = "erofs.img"

#: Mounts an image of EROFS on a directory.
MountErofs = Callable[[Path, Path], AbstractContextManager[object]]


def make_erofs(source: Path, image: Path) -> None:
    """An uncompressed image of a directory. Raises CommandError."""
    run(["mkfs.erofs", "--quiet", image, source], timeout_s=_MKFS_TIMEOUT_S)


@contextmanager
def erofs_on_loop(image: Path, target: Path, *, direct_io: bool) -> Iterator[None]:
    with loop_device(image, read_only=True, direct_io=direct_io) as device:
        with mounted(device.path, target, fs_type="erofs", read_only=True):
            yield


def host_erofs(image: Path, disk: Path, at: Path) -> None:
    """Put an image on an ext4 of its own, made in the sparse file ``disk``, for
    erofs_on_file(); ``at`` is a directory to mount that on meanwhile.

    NB: the kernel mounts no file on tmpfs, which cannot read a page by itself.
    """
    with loop_device(disk) as device:
        run(["mkfs.ext4", "-q", device.path], timeout_s=_MKFS_TIMEOUT_S)
        with mounted(device.path, at, fs_type="ext4"):
            shutil.copyfile(image, at / _HOSTED)


@contextmanager
def erofs_on_file(disk: Path, at: Path, target: Path) -> Iterator[None]:
    """An image that host_erofs() has put on a disk: EROFS reads the file itself, with
    no block device of its own (Linux 6.12). Raises CapabilityError before that.
    """
    with ExitStack() as stack:
        device = stack.enter_context(loop_device(disk, read_only=True))
        stack.enter_context(
            mounted(
                *(device.path, at),
                fs_type="ext4",
                options=["noload"],
                read_only=True,
            )
        )
        try:
            stack.enter_context(
                mounted(
                    *(at / _HOSTED, target),
                    fs_type="erofs",
                    read_only=True,
                    by_kernel=True,
                )
            )
        except OSError as error:
            if error.errno == errno.ENOTBLK:
                raise CapabilityError(
                    "this kernel mounts EROFS from block devices only",
                    hint="use Linux >= 6.12 with CONFIG_EROFS_FS_BACKED_BY_FILE",
                ) from error
            raise
        yield


@contextmanager
def overlay(lower: Path, upper: Path, target: Path) -> Iterator[None]:
    """overlayfs; ``upper`` is an empty directory for what is written."""
    for name in ("files", "work"):
        (upper / name).mkdir()
    options = [
        f"lowerdir={lower}",
        f"upperdir={upper / 'files'}",
        f"workdir={upper / 'work'}",
    ]
    with mounted("overlay", target, fs_type="overlay", options=options):
        yield


def make_composefs(source: Path, image: Path, store: Path) -> None:
    """An image of a directory's metadata; contents of files go to ``store``. Raises
    CommandError.
    """
    run(
        ["mkcomposefs", f"--digest-store={store}", source, image],
        timeout_s=_MKFS_TIMEOUT_S,
    )


@contextmanager
def composefs(image: Path, store: Path, target: Path) -> Iterator[None]:
    with mounted(
        image,
        target,
        fs_type="composefs",
        options=[f"basedir={store}"],
        read_only=True,
        # That is how its own mount helper has it listed.
        shown=("overlay", "composefs"),
    ):
        yield
