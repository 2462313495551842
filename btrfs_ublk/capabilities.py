"""What this machine can do, why not, and the cure. Features are probed, never guessed
from a version.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from btrfs_ublk.errors import CapabilityError, CommandError
from btrfs_ublk.helpers import check_helper
from btrfs_ublk.process import run
from btrfs_ublk.units import format_size

_MODPROBE_TIMEOUT_S = 20


class Capability(Protocol):
    """Something that a machine can or cannot do."""

    @property
    def name(self) -> str: ...

    @property
    def cure(self) -> str:
        """What makes it available."""

    def probe(self) -> str | None:
        """None when it is there, else the reason why not."""


def checkout() -> Path | None:
    """The project's directory, where the package runs from it."""
    path = Path(__file__).parents[1]
    return path if (path / "scripts" / "vm").is_file() else None


def _or_vm(cure: str) -> str:
    """An installed package has no scripts."""
    return f"{cure}, or a VM: scripts/vm" if checkout() else cure


def require(*capabilities: Capability) -> None:
    """Raise CapabilityError with reason and cure for the first that is missing."""
    for capability in capabilities:
        reason = capability.probe()
        if reason is not None:
            raise CapabilityError(
                f"{capability.name} is needed here: {reason}", hint=capability.cure
            )


@dataclass(frozen=True)
class Root:
    """To be root, as mounting, loop and ublk devices demand."""

    name: ClassVar[str] = "root"
    cure: ClassVar[str] = "run as root (sudo)"

    def probe(self) -> str | None:
        uid = os.geteuid()
        return f"the effective user is {uid}, not 0" if uid else None


_only_looking = ContextVar("only_looking", default=False)


@contextmanager
def only_looking() -> Iterator[None]:
    """Within it, probes load no modules: what would be loaded counts as there."""
    token = _only_looking.set(True)
    try:
        yield
    finally:
        _only_looking.reset(token)


def _load(module: str) -> None:
    """Raises CommandError."""
    options = ["--dry-run"] if _only_looking.get() else []
    run(["modprobe", *options, module], timeout_s=_MODPROBE_TIMEOUT_S)


def _device_node(path: str, module: str) -> str | None:
    """None when the kernel offers the device; loads its module if need be."""
    if Path(path).exists():
        return None
    reason = f"{path} does not exist"
    if os.geteuid() != 0:
        return f"{reason}, and only root can load the module {module}"
    if not shutil.which("modprobe"):
        return f"{reason}, and there is no modprobe to load the module {module}"
    try:
        _load(module)
    except CommandError as error:
        last_line = error.message.splitlines()[-1].strip()
        return f"{reason}, and the module {module} does not load ({last_line})"
    if Path(path).exists() or _only_looking.get():
        return None
    return f"{reason}, though {module} is loaded"


@dataclass(frozen=True)
class DeviceNode:
    """A kernel feature whose control node shows that it is there."""

    name: str
    path: str
    module: str
    cure: str

    def probe(self) -> str | None:
        return _device_node(self.path, self.module)


#: Set to "1" by scripts/vm: whatever is loaded or broken there is gone with the guest.
IN_VM_VARIABLE = "BTRFS_UBLK_IN_VM"


@dataclass(frozen=True)
class LoadableModule:
    """A kernel module that may be loaded for a while, with parameters of ours: only in
    the VM, and only where it is not there already.
    """

    module: str

    @property
    def name(self) -> str:
        return f"the module {self.module}"

    @property
    def cure(self) -> str:
        return "run this in a VM: scripts/vm"

    def probe(self) -> str | None:
        if Path("/sys/module", self.module).exists():
            return "it is there already, and its devices may be somebody's"
        if os.environ.get(IN_VM_VARIABLE) != "1":
            return "modules are loaded in the VM of scripts/vm only"
        try:
            run(["modprobe", "--dry-run", self.module], timeout_s=_MODPROBE_TIMEOUT_S)
        except CommandError as error:
            return error.message.splitlines()[-1].strip()
        return None


@dataclass(frozen=True)
class FileSystem:
    """A file system that the kernel can mount; its module is loaded if need be."""

    fs_type: str

    @property
    def name(self) -> str:
        return self.fs_type

    @property
    def cure(self) -> str:
        return _or_vm(f"use a kernel that has {self.fs_type}")

    def probe(self) -> str | None:
        if self._is_known():
            return None
        reason = f"this kernel has no {self.fs_type}"
        if os.geteuid() != 0 or not shutil.which("modprobe"):
            return reason
        try:
            _load(self.fs_type)
        except CommandError as error:
            return f"{reason} ({error.message.splitlines()[-1].strip()})"
        return None if self._is_known() or _only_looking.get() else reason

    def _is_known(self) -> bool:
        lines = Path("/proc/filesystems").read_text().splitlines()
        return self.fs_type in (line.split("\t")[-1] for line in lines)


@dataclass(frozen=True)
class Program:
    """A program on PATH."""

    program: str
    package: str

    @property
    def name(self) -> str:
        return self.program

    @property
    def cure(self) -> str:
        return f"install the package {self.package}"

    def probe(self) -> str | None:
        return None if shutil.which(self.program) else "it is not on PATH"


@dataclass(frozen=True)
class Helper:
    """One of the project's own C helpers, built."""

    helper: str

    @property
    def name(self) -> str:
        return self.helper

    @property
    def cure(self) -> str:
        error = self._error()
        return error.hint or "" if error else ""

    def probe(self) -> str | None:
        error = self._error()
        return error.message if error else None

    def _error(self) -> CapabilityError | None:
        try:
            check_helper(self.helper)
        except CapabilityError as error:
            return error
        except CommandError:
            pass  # it is there; whoever uses it sees why it fails
        return None


@dataclass(frozen=True)
class SparseFile:
    """A directory whose file system holds a sparse file of ``size_bytes``.

    ext4 stops at 16 TiB; tmpfs goes to 2^63 - 1 bytes, XFS and btrfs nearly as far.
    """

    directory: Path
    size_bytes: int

    @property
    def name(self) -> str:
        return f"a sparse file of {format_size(self.size_bytes)} in {self.directory}"

    @property
    def cure(self) -> str:
        return "use a directory on tmpfs, XFS or btrfs: /dev/shm, say"

    def probe(self) -> str | None:
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                os.ftruncate(file.fileno(), self.size_bytes)
        except OSError as error:
            if error.errno == errno.EFBIG:
                return "its file system has a lower limit on the size of a file"
            return f"{error.strerror}"
        return None


@dataclass(frozen=True)
class ZramDriver:
    """It makes new devices, so those that exist are left alone."""

    name: ClassVar[str] = "zram"
    cure: ClassVar[str] = _or_vm("use a kernel that has CONFIG_ZRAM")
    path: ClassVar[str] = "/sys/class/zram-control"

    def probe(self) -> str | None:
        there = Path(self.path).exists()
        return None if there else LoadableModule("zram").probe()


ROOT = Root()
BTRFS = DeviceNode(
    "btrfs", "/dev/btrfs-control", "btrfs", "use a kernel that has CONFIG_BTRFS_FS"
)
LOOP = DeviceNode(
    "loop devices",
    "/dev/loop-control",
    "loop",
    "use a kernel that has CONFIG_BLK_DEV_LOOP; in a container, pass /dev/loop-control",
)
UBLK = DeviceNode(
    "ublk",
    "/dev/ublk-control",
    "ublk_drv",
    _or_vm("use a kernel >= 6.0 that has CONFIG_BLK_DEV_UBLK"),
)
FUSE = DeviceNode("FUSE", "/dev/fuse", "fuse", "use a kernel that has CONFIG_FUSE_FS")
ZRAM = ZramDriver()
MOUNT = Program("mount", "mount (util-linux)")
MKFS_BTRFS = Program("mkfs.btrfs", "btrfs-progs")
BTRFS_PROGS = Program("btrfs", "btrfs-progs")


def sparse_directory(
    size_bytes: int, *, candidates: Iterable[Path | str] | None = None
) -> Path:
    """The first directory that holds a sparse file of that size: of ``candidates``, by
    default the temporary directory and /dev/shm. Raises CapabilityError when none does.
    """
    reasons = []
    for directory in candidates or (tempfile.gettempdir(), "/dev/shm"):
        capability = SparseFile(Path(directory), size_bytes)
        reason = capability.probe()
        if reason is None:
            return capability.directory
        reasons.append(f"{directory}: {reason}")
    raise CapabilityError(
        f"no directory holds a sparse file of {format_size(size_bytes)} "
        f"({'; '.join(reasons)})",
        hint="set TMPDIR to a directory on tmpfs, XFS or btrfs",
    )
