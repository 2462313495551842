"""The kernel's own devices: RAM disks and loop devices, each also with a file of btrfs;
null_blk; and files without a block layer: tmpfs, /dev/zero.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from btrfs_ublk.base.capabilities import BTRFS, LOOP, MKFS_BTRFS, ROOT, Capability
from btrfs_ublk.base.process import run
from btrfs_ublk.bench.content import STAMPS, write_content
from btrfs_ublk.bench.peer import Peer, Setting, Subject, peer
from btrfs_ublk.bench.resources.kernel_module import LoadableModule, loaded_module
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel import blockdev
from btrfs_ublk.kernel.btrfs import forget_device
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.server import ZeroSegment
from btrfs_ublk.units import BLOCK_BYTES, GIB, KIB, MIB

_TIMEOUT_S = 60.0
#: The room that btrfs needs for itself, with single metadata.
_BTRFS_BYTES = 256 * MIB
#: A disk uses memory as it is written, and keeps it until the module is unloaded.
_BRD_DISKS, _BRD_BYTES = 4, 64 * GIB
_NULL_BLK, _NULL_BLK_DEPTH = Path("/dev/nullb0"), 64

#: Makes a new, writable device of at least so many bytes.
Disk = Callable[[Setting, int], AbstractContextManager[Path]]


@contextmanager
def _raw(disk: Disk, setting: Setting) -> Iterator[Subject]:
    with disk(setting, setting.size_bytes) as device:
        write_content(device, STAMPS, setting.size_bytes)
        yield Subject(device, STAMPS)


@contextmanager
def _btrfs_file(
    disk: Disk, options: Sequence[str], setting: Setting
) -> Iterator[Subject]:
    target = setting.new_directory("btrfs")
    with disk(setting, setting.size_bytes + _BTRFS_BYTES) as device:
        # With the profiles of a sprout.
        profiles = ["--metadata=single", "--data=single"]
        run(["mkfs.btrfs", "--quiet", *profiles, device], timeout_s=_TIMEOUT_S)
        try:
            with mounted(device, target, options=options):
                write_content(target / "file", STAMPS, setting.size_bytes)
                yield Subject(target / "file", STAMPS)
        finally:
            with suppress(BtrfsUblkError):
                forget_device(device)


def _disk_peers(name: str, what: str, disk: Disk, driver: Capability) -> list[Peer]:
    """Make NAME, btrfs-NAME, and btrfs-NAME-nodatasum, which clones on sprouts are."""
    needs = (ROOT, driver)
    made = [Peer(name, "device", f"{what} itself", needs, partial(_raw, disk))]
    for infix, sums, options in (
        ("", "with", ()),
        ("-nodatasum", "without", ("nodatasum",)),
    ):
        made.append(
            Peer(
                f"btrfs-{name}{infix}",
                "file",
                f"a file of btrfs, {sums} checksums, on {what}",
                (*needs, BTRFS, MKFS_BTRFS),
                partial(_btrfs_file, disk, options),
            )
        )
    return made


@contextmanager
def _all_brd() -> Iterator[list[Path]]:
    """Yield the disks that no peer has taken yet."""
    parameters = {"rd_nr": _BRD_DISKS, "rd_size": _BRD_BYTES // KIB}
    with loaded_module("brd", parameters):
        disks = [Path(f"/dev/ram{number}") for number in range(_BRD_DISKS)]
        blockdev.wait_for_node(disks[-1], timeout_s=_TIMEOUT_S)
        yield disks


@contextmanager
def _brd(setting: Setting, _size_bytes: int) -> Iterator[Path]:
    yield setting.shared("brd", _all_brd).pop()


def _loop(direct_io: bool) -> Disk:
    @contextmanager
    def disk(setting: Setting, size_bytes: int) -> Iterator[Path]:
        with setting.new_file(size_bytes) as path:
            with loop_device(path, direct_io=direct_io) as device:
                yield device.path

    return disk


@peer(
    "null_blk",
    "device",
    "null_blk: completes every request at once, reads zeroes",
    (ROOT, LoadableModule("null_blk")),
)
def _null_blk(setting: Setting) -> Iterator[Subject]:
    parameters = {
        "nr_devices": 1,
        "gb": -(-setting.size_bytes // GIB),
        "bs": BLOCK_BYTES,
        "submit_queues": setting.queues or 1,
        "hw_queue_depth": setting.depth or _NULL_BLK_DEPTH,
        "irqmode": 0,  # completed on the submitting CPU
    }
    with loaded_module("null_blk", parameters):
        blockdev.wait_for_node(_NULL_BLK, timeout_s=_TIMEOUT_S)
        yield Subject(_NULL_BLK, ZeroSegment(offset=0, length=setting.size_bytes))


@peer("tmpfs", "file", "a file on tmpfs: the page cache itself")
def _tmpfs(setting: Setting) -> Iterator[Subject]:
    yield Subject(setting.source_file(), STAMPS, direct=False)


@peer("dev-zero", "file", "/dev/zero: what the reader itself costs")
def _dev_zero(setting: Setting) -> Iterator[Subject]:
    content = ZeroSegment(offset=0, length=setting.size_bytes)
    yield Subject(Path("/dev/zero"), content, direct=False)


PEERS = [
    *_disk_peers("brd", "a brd RAM disk", _brd, LoadableModule("brd")),
    *_disk_peers("loop", "a loop device on tmpfs", _loop(False), LOOP),
    *_disk_peers("loop-direct", "a loop device with direct I/O", _loop(True), LOOP),
    *(_null_blk, _tmpfs, _dev_zero),
]
