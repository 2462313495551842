"""Find out what this machine can do, why it cannot do the rest, and what helps.

Features are probed, never guessed from a version of the kernel."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Protocol

from btrfs_ublk.base.helpers import check_helper
from btrfs_ublk.base.process import find_program, run
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import CapabilityError, CommandError
from btrfs_ublk.units import format_size

_MODPROBE_TIMEOUT_S = 20
_FIO_TIMEOUT_S = 20.0
#: This version brought io_uring. It also has all other features that are used here.
_OLDEST_FIO = (3, 13)


class Capability(Protocol):
    """Something that a machine can or cannot do."""

    @property
    def name(self) -> str: ...

    @property
    def hint(self) -> str:
        """What makes it available."""

    def probe(self) -> str | None:
        """Return None when it is available, else the reason why not."""


@dataclass(frozen=True)
class Probed:
    """A capability that a function probes."""

    name: str
    hint: str
    probe: Callable[[], str | None]


def checkout() -> Path | None:
    """Return the project's directory if the package runs from it, else None."""
    path = Path(__file__).parents[2]
    return path if (path / "scripts" / "vm").is_file() else None


def or_vm(hint: str) -> str:
    """Add the hint to use a VM where that is possible: only a checkout has scripts."""
    return f"{hint}, or a VM: scripts/vm" if checkout() else hint


def require(*capabilities: Capability) -> None:
    """Raise CapabilityError, with reason and hint, for the first missing capability."""
    for capability in capabilities:
        reason = capability.probe()
        if reason is not None:
            raise CapabilityError(
                f"{capability.name} is needed here: {reason}", hint=capability.hint
            )


def _probe_root() -> str | None:
    uid = os.geteuid()
    return f"the effective user is {uid}, not 0" if uid else None


_only_looking = ContextVar("only_looking", default=False)


@contextmanager
def only_looking() -> Iterator[None]:
    """Load no modules in probes: a module that would load counts as loaded."""
    token = _only_looking.set(True)
    try:
        yield
    finally:
        _only_looking.reset(token)


def _load(module: str) -> None:
    """Load a module. Raises CommandError."""
    options = ["--dry-run"] if _only_looking.get() else []
    run(["modprobe", *options, module], timeout_s=_MODPROBE_TIMEOUT_S)


def _has_module(module: str) -> bool:
    """Return whether modprobe(8), which takes longer to find out, would find it."""
    try:
        known = Path("/lib/modules", os.uname().release, "modules.dep").read_bytes()
    except OSError:
        return False
    return f"/{module}.ko".encode() in known


def _device_node(path: str, module: str) -> str | None:
    """Return why the kernel lacks a device, or None; load its module if need be."""
    if Path(path).exists():
        return None
    reason = f"{path} does not exist"
    if os.geteuid() != 0:
        return f"{reason}, and only root can load the module {module}"
    if not find_program("modprobe"):
        return f"{reason}, and there is no modprobe to load the module {module}"
    if not _only_looking.get() and not _has_module(module):
        return f"{reason}, and this kernel has no module {module} in /lib/modules"
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
    hint: str

    def probe(self) -> str | None:
        return _device_node(self.path, self.module)


@dataclass(frozen=True)
class Program:
    """A program on PATH."""

    name: str
    package: str

    @property
    def hint(self) -> str:
        return f"install the package {self.package}"

    def probe(self) -> str | None:
        return None if find_program(self.name) else "it is not on PATH"


@lru_cache  # each run of a matrix of benchmarks asks
def _version_and_engines(_path: str | None) -> tuple[str, Sequence[str]]:
    """Return "fio-3.33", say, and the names of its engines. Raises CommandError."""
    version = run(["fio", "--version"], timeout_s=_FIO_TIMEOUT_S).stdout.strip()
    return version, run(["fio", "--enghelp"], timeout_s=_FIO_TIMEOUT_S).stdout.split()


@dataclass(frozen=True)
class Fio:
    """fio, with an engine."""

    engine: str

    name: ClassVar[str] = "fio"

    @property
    def hint(self) -> str:
        oldest = ".".join(map(str, _OLDEST_FIO))
        return f"install fio {oldest} or newer, with {self.engine}"

    def probe(self) -> str | None:
        missing = Program("fio", "fio").probe()
        if missing is not None:
            return missing
        try:
            version, engines = _version_and_engines(find_program("fio"))
        except CommandError as error:
            return error.message
        found = re.match(r"fio-(\d+)\.(\d+)", version)
        if found is None or tuple(map(int, found.groups())) < _OLDEST_FIO:
            return f"{version or 'what calls itself fio'} is too old"
        if self.engine not in engines:
            return f"{version} was built without the engine {self.engine}"
        return None


@dataclass(frozen=True)
class PythonPackage:
    """A Python package that few commands need."""

    name: str
    module: str | None = None  # if it is not called like the package
    setup: str = "--bench"  # what installs it in a checkout

    @property
    def package(self) -> str | None:
        """The distribution's package, where pip must not install any (PEP 668)."""
        if sys.prefix != sys.base_prefix:
            return None  # pip can install in a virtual environment
        with deferred():
            import sysconfig  # Nearly all commands do without it.
        marker = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
        return f"python3-{self.name.lower()}" if marker.is_file() else None

    @property
    def hint(self) -> str:
        if self.package is not None:
            return f"install the package {self.package}"
        if checkout():
            return f"run scripts/setup {self.setup}"
        return f"run {sys.executable} -m pip install {self.name}"

    def probe(self) -> str | None:
        try:
            found = find_spec(self.module or self.name.lower()) is not None
        except ModuleNotFoundError:  # nor has it the package that the module is in
            found = False
        return None if found else "this Python does not have it"


@dataclass(frozen=True)
class Helper:
    """One of the project's own C helpers, built."""

    name: str

    @property
    def hint(self) -> str:
        error = self._error()
        return error.hint or "" if error else ""

    def probe(self) -> str | None:
        error = self._error()
        return error.message if error else None

    def _error(self) -> CapabilityError | None:
        try:
            check_helper(self.name)
        except CapabilityError as error:
            return error
        except CommandError:
            pass  # It exists. Its users see why it fails.
        return None


@dataclass(frozen=True)
class SparseFile:
    """A directory whose file system holds a sparse file of ``size_bytes``.

    ext4 allows 16 TiB, tmpfs 2^63 - 1 bytes, XFS and btrfs nearly as much.
    """

    directory: Path
    size_bytes: int

    @property
    def name(self) -> str:
        return f"a sparse file of {format_size(self.size_bytes)} in {self.directory}"

    @property
    def hint(self) -> str:
        return "use a directory on tmpfs, XFS or btrfs: /dev/shm, say"

    def probe(self) -> str | None:
        with deferred():
            from tempfile import TemporaryFile  # Most commands do without it.
        try:
            with TemporaryFile(dir=self.directory) as file:
                os.ftruncate(file.fileno(), self.size_bytes)
        except OSError as error:
            if error.errno == errno.EFBIG:
                return "its file system has a lower limit on the size of a file"
            return f"{error.strerror}"
        return None


#: What mounts, loop devices and most ublk devices need.
ROOT = Probed("root", "run as root (sudo)", _probe_root)
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
    or_vm("use a kernel >= 6.0 that has CONFIG_BLK_DEV_UBLK"),
)
FUSE = DeviceNode("FUSE", "/dev/fuse", "fuse", "use a kernel that has CONFIG_FUSE_FS")
MKFS_BTRFS = Program("mkfs.btrfs", "btrfs-progs")
BTRFS_PROGS = Program("btrfs", "btrfs-progs")
REPORT_PACKAGES = (PythonPackage("Jinja2"),)
CONTAINER_PACKAGES = (
    PythonPackage("grpcio", "grpc", setup="--test"),
    PythonPackage("protobuf", "google.protobuf", setup="--test"),
)


def sparse_directory(
    size_bytes: int, *, candidates: Iterable[Path | str] | None = None
) -> Path:
    """Return the first of ``candidates`` that can hold a sparse file of that size. By
    default, these are the temporary directory and /dev/shm. Raises CapabilityError when
    none can."""
    with deferred():
        from tempfile import gettempdir
    reasons = []
    for directory in candidates or (gettempdir(), "/dev/shm"):
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
