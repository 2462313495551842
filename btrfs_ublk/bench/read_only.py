"""Read-only file systems of a directory: EROFS, overlayfs on it, composefs.

``Prepare`` makes an image of a directory once, which is then mounted as needed.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from btrfs_ublk.base.capabilities import FileSystem, Program
from btrfs_ublk.base.process import run
from btrfs_ublk.bench.peer import Setting
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.units import MIB

EROFS = FileSystem("erofs")
OVERLAY = FileSystem("overlay")
EXT4 = FileSystem("ext4")
MKFS_EROFS = Program("mkfs.erofs", "erofs-utils")
MKCOMPOSEFS = Program("mkcomposefs", "composefs")
MOUNT_COMPOSEFS = Program("mount.composefs", "composefs")

MKFS_EXT4 = Program("mkfs.ext4", "e2fsprogs")

_MKFS_TIMEOUT_S = 300.0
_HOSTED = "erofs.img"

#: The room that ext4 takes for itself.
_EXT4_BYTES = 64 * MIB

#: Mounts the image anew on a directory; yields where its files are.
Mounted = Callable[[Path], AbstractContextManager[Path]]
#: Makes the image of a directory; its resources are put on the stack.
Prepare = Callable[[Setting, Path, ExitStack], Mounted]


def make_erofs(source: Path, image: Path) -> None:
    """Make an uncompressed image of a directory. Raises CommandError."""
    run(["mkfs.erofs", "--quiet", image, source], timeout_s=_MKFS_TIMEOUT_S)


@contextmanager
def erofs_on_loop(image: Path, target: Path, *, direct_io: bool) -> Iterator[None]:
    with loop_device(image, read_only=True, direct_io=direct_io) as device:
        with mounted(device.path, target, fs_type="erofs", read_only=True):
            yield


def host_erofs(image: Path, disk: Path, at: Path) -> None:
    """Put an image on a new ext4 in the sparse file ``disk``, for erofs_on_file();
    ``at`` is a temporary mount point.

    NB: the kernel mounts no file on tmpfs, which cannot read a page by itself.
    """
    with loop_device(disk) as device:
        run(["mkfs.ext4", "-q", device.path], timeout_s=_MKFS_TIMEOUT_S)
        with mounted(device.path, at, fs_type="ext4"):
            shutil.copyfile(image, at / _HOSTED)


@contextmanager
def erofs_on_file(disk: Path, at: Path, target: Path) -> Iterator[None]:
    """Mount an image from host_erofs(): EROFS reads the file itself, without a block
    device (since Linux 6.12). Raises CapabilityError on older kernels.
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
    """Mount overlayfs; ``upper`` is an empty directory for written data."""
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
    """Make an image of a directory's metadata; contents of files go to ``store``.
    Raises CommandError.
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
        # Its mount helper lists it with these names.
        shown=("overlay", "composefs"),
    ):
        yield


def _image(setting: Setting, source: Path) -> Path:
    """Return an image of a directory, shared by all."""

    @contextmanager
    def new() -> Iterator[Path]:
        image = setting.new_directory("image") / "erofs.img"
        make_erofs(source, image)
        yield image

    return setting.shared(f"erofs of {source}", new)


def on_erofs(direct_io: bool) -> Prepare:
    def prepare(setting: Setting, source: Path, _: ExitStack) -> Mounted:
        image = _image(setting, source)

        @contextmanager
        def mount(target: Path) -> Iterator[Path]:
            with erofs_on_loop(image, target, direct_io=direct_io):
                yield target

        return mount

    return prepare


def on_hosted_erofs(setting: Setting, source: Path, stack: ExitStack) -> Mounted:
    image, host = _image(setting, source), setting.new_directory("host")
    # ext4 also reserves a part for root.
    disk_bytes = 2 * image.stat().st_size + _EXT4_BYTES
    disk = stack.enter_context(setting.new_file(disk_bytes))
    host_erofs(image, disk, host)

    @contextmanager
    def mount(target: Path) -> Iterator[Path]:
        with erofs_on_file(disk, host, target):
            yield target

    return mount


def on_overlay(direct_io: bool) -> Prepare:
    """Written data are on tmpfs; the first write to a file copies all of it up."""

    def prepare(setting: Setting, source: Path, _: ExitStack) -> Mounted:
        image, lower = _image(setting, source), setting.new_directory("lower")

        @contextmanager
        def mount(target: Path) -> Iterator[Path]:
            upper = setting.new_directory("upper")
            with erofs_on_loop(image, lower, direct_io=direct_io):
                with overlay(lower, upper, target):
                    yield target

        return mount

    return prepare


def on_composefs(setting: Setting, source: Path, _: ExitStack) -> Mounted:
    store, images = setting.new_directory("store"), setting.new_directory("image")
    image = images / "composefs.img"
    make_composefs(source, image, store)

    @contextmanager
    def mount(target: Path) -> Iterator[Path]:
        with composefs(image, store, target):
            yield target

    return mount
