"""Keep on disk what is known of devices: each has a directory below /run/btrfs-ublk.

Root trusts what is there, so the directories must be of mode 0700 and ours. Files are
replaced by rename(2), so readers always see a complete one. A file that is not valid,
or of a newer version, causes an error that names it, and is not removed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, Literal

from btrfs_ublk.base.jsonfile import RecordFormat
from btrfs_ublk.base.private_dirs import check_private, make_private
from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.units import BLOCK_BYTES, KIB, MIB

RUN_VARIABLE = "BTRFS_UBLK_RUN_DIR"
#: A boot empties /run; it also ends all devices.
RUN_DIRECTORY = "/run/btrfs-ublk"
FORMAT_VERSION = 1

FrontEnd = Literal["ublk", "fuse"]
#: "auto" is the best one of this front end and kernel (docs/design/devices.md).
RecoveryName = Literal["auto", "reissue", "queue", "fail-io", "none"]
RECOVERIES: dict[FrontEnd, tuple[RecoveryName, ...]] = {
    "ublk": ("auto", "reissue", "queue", "fail-io", "none"),
    "fuse": ("auto", "reissue", "none"),
}
#: A former recovery of fuse, which lost data that were not synced. It means "auto" now.
FORMER_RECOVERY = "swap"
#: The time to become ready, or to end in order. A ublk server may need all of it.
DEFAULT_TIMEOUT_S = 120.0
DEFAULT_HANG_TIMEOUT_S = 30.0

#: What a supervisor notes. "failing": it tries again and again; "failed": there never
#: was a device; "lost": there was one, which cannot be brought back.
Status = Literal[
    "new", "starting", "serving", "recovering", "failing", "failed", "lost", "removing"
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HALF = re.compile(rf"\.({_NAME.pattern})\.[0-9a-f]{{16}}")
_LIMITS = {"queues": (1, 256), "depth": (1, 1024), "device_id": (0, 1 << 20)}
_MAX_IO_BYTES = {"ublk": 32 * MIB, "fuse": MIB}
_HINT = f"run as root, or name a directory of yours in {RUN_VARIABLE}"


class StateError(BtrfsUblkError):
    """A device's files are not valid. They were left as they are."""


def check_name(name: str, what: str = "a device or a volume") -> str:
    """Return the name. Raises UsageError when no device can have it, nor ``what``."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of {what}",
            hint="a name has 1 to 64 of A-Z a-z 0-9 . _ -, and begins with a letter "
            "or digit",
        )
    return name


def check_limits(**numbers: int | None) -> None:
    """Raise UsageError for queues, a depth or a device_id that no server takes."""
    for key, value in numbers.items():
        low, high = _LIMITS[key]
        if value is not None and not low <= value <= high:
            raise UsageError(f"{key} {value} is not from {low} to {high}")


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """What was asked for (device.json). None leaves the choice to the server.

    ``tag`` (16 hex digits) is in the kernel's record of the ublk or loop device.
    ``features`` of the ublk driver are required. ``server`` is the program; None is the
    package's own. With ``hang_timeout_s`` 0, the server never counts as hanging.
    """

    name: str
    tag: str
    front_end: FrontEnd
    size_bytes: int
    read_only: bool = True
    recovery: RecoveryName = "auto"
    queues: int | None = None
    depth: int | None = None
    max_io_bytes: int | None = None
    features: list[str] = field(default_factory=list)
    device_id: int | None = None
    hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S
    server: str | None = None
    #: The interpreter that has the package that supervises it.
    python: str = sys.executable
    #: Counts the upgrades that were asked for.
    generation: int = 0

    def check(self) -> None:
        """Raise UsageError for what no server takes."""
        check_name(self.name)
        if self.recovery not in RECOVERIES[self.front_end]:
            raise UsageError(
                f"the front end {self.front_end} has no recovery {self.recovery!r}",
                hint=f"it has: {', '.join(RECOVERIES[self.front_end])}",
            )
        check_limits(queues=self.queues, depth=self.depth, device_id=self.device_id)
        if self.front_end == "fuse" and self.features:
            raise UsageError(
                f"feature {self.features[0]} needs the front end ublk, not fuse"
            )
        if self.front_end == "fuse" and self.device_id is not None:
            raise UsageError(
                f"device id {self.device_id} needs the front end ublk, not fuse",
                hint="leave it out: the first free loop device is taken",
            )
        largest = _MAX_IO_BYTES[self.front_end]
        size = self.max_io_bytes
        if size is not None and (not 64 * KIB <= size <= largest or size % BLOCK_BYTES):
            raise UsageError(
                f"{size} bytes cannot be the largest request: for {self.front_end} it "
                f"is a multiple of {BLOCK_BYTES} from {64 * KIB} to {largest}"
            )
        if not 0 <= self.hang_timeout_s < 1e6:
            raise UsageError(
                f"the hang timeout cannot be {self.hang_timeout_s} s",
                hint="it is a number of seconds from 0 (never) to less than 1000000",
            )


@dataclass(frozen=True, kw_only=True)
class KeeperRecord:
    """A keeper (keeper.py): ``fds`` are the numbers of the descriptors that it holds.
    ``revives``: it starts another supervisor when that has died."""

    process: ProcessIdentity
    fds: list[int]
    revives: bool


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """The state of a device, as its supervisor last knew it (state.json).

    ``recoveries`` counts servers that took over from a dead one, ``upgrades`` those
    that replaced a running one, ``failures`` failed attempts since the last success.
    ``reason`` says why it is not "serving"; ``exit_status`` is for commands then.
    ``last_end`` says how the last server ended; ``program`` is the present one's.
    ``generation`` is the last upgrade that was tried, ``upgrade_error`` why it failed.
    ``ready`` is the server's ready line. ``keepers`` has two while one replaces the
    other, the newer one last. Times are seconds since 1970.
    """

    status: Status = "new"
    reason: str | None = None
    exit_status: int = 0
    device: str | None = None
    server: ProcessIdentity | None = None
    program: str | None = None
    last_end: str | None = None
    supervisor: ProcessIdentity | None = None
    keepers: list[KeeperRecord] = field(default_factory=list)
    recoveries: int = 0
    upgrades: int = 0
    generation: int = 0
    upgrade_error: str | None = None
    failures: int = 0
    since_s: float = 0.0
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def reviving(self) -> KeeperRecord | None:
        """The keeper that starts another supervisor when that has died, if any."""
        if self.supervisor is None:
            return None  # The supervisor has ended on purpose.
        for record in self.keepers:
            if record.revives and record.process.is_alive():
                return record
        return None

    def but(self, **changes: Any) -> DeviceState:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


def _identity(keys: Any) -> ProcessIdentity:
    """Parse an identity. Raises KeyError, TypeError or ValueError."""
    return ProcessIdentity(int(keys["pid"]), int(keys["start_ticks"]))


def devices_directory(*, make: bool = False) -> Path:
    """Return the directory with those of all devices; it is absolute, and has no
    symbolic links. Raises BtrfsUblkError when it is not ours alone: others who can
    write there could choose what root runs."""
    base = Path(os.environ.get(RUN_VARIABLE) or RUN_DIRECTORY)
    path = base / "devices"
    for directory in (base, path):
        if make:
            make_private(directory, what="run directory", hint=_HINT)
        else:
            check_private(directory, what="run directory", hint=_HINT, missing_ok=True)
    # NB: a supervisor works in another directory, and /proc/PID/fd has no such links.
    return Path(os.path.realpath(path))


class DeviceDirectory:
    """The files of one device, at ``path``. The constructor touches no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.lock = path / "lock"
        self.server_lock = path / "server.lock"
        self.update_lock = path / "update.lock"
        self.description = path / "description.json"
        self.log = path / "log"
        self._spec = path / "device.json"
        self._state = path / "state.json"

    def check(self) -> None:
        """Raise UsageError when there is no such device, BtrfsUblkError when the
        directory is not ours alone.
        """
        if not os.path.lexists(self.path):
            raise UsageError(
                f"there is no device {self.name!r}",
                hint="see: btrfs-ublk device list; a volume has one while it is up",
            )
        check_private(self.path, what="device directory", hint=_HINT)

    def spec(self) -> DeviceSpec:
        """Return what was asked for. Raises StateError, which names the file."""
        keys = _FILES.read(self._spec)
        if keys is None:
            raise StateError(
                f"{self._spec} is missing, which says how the device was made",
                hint=f"when nothing uses it any more, remove {self.path}",
            )
        if (keys.get("front_end"), keys.get("recovery")) == ("fuse", FORMER_RECOVERY):
            keys["recovery"] = "auto"  # written by an earlier version
        for key in ("unprivileged", "realtime"):
            keys.pop(key, None)  # as well
        spec = _FILES.parse(DeviceSpec, keys, self._spec)
        try:
            spec.check()
        except UsageError as error:
            raise _FILES.damaged(self._spec, str(error)) from error
        return spec

    def state(self) -> DeviceState:
        """Return the last state that was written, or a new one. Raises StateError."""
        keys = _FILES.read(self._state)
        if keys is None:
            return DeviceState()
        try:
            for key in ("server", "supervisor"):
                if keys.get(key) is not None:
                    keys[key] = _identity(keys[key])
            keys["keepers"] = [
                KeeperRecord(
                    process=_identity(keeper["process"]),
                    fds=[int(fd) for fd in keeper["fds"]],
                    revives=bool(keeper["revives"]),
                )
                for keeper in keys.get("keepers", [])
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise _FILES.damaged(self._state, f"no process: {error}") from error
        return _FILES.parse(DeviceState, keys, self._state)

    def write_spec(self, spec: DeviceSpec) -> None:
        _FILES.write(self._spec, asdict(spec))

    def write_state(self, state: DeviceState) -> None:
        """Write the state; the caller must hold ``lock``. Raises BtrfsUblkError."""
        _FILES.write(self._state, asdict(state))

    def write_description(self, text: str) -> None:
        _FILES.replace(self.description, text)


def device_directory(name: str) -> DeviceDirectory:
    """Return the directory of a device. Raises UsageError for an invalid name."""
    return DeviceDirectory(devices_directory() / check_name(name))


def half_path(path: Path, tag: str) -> Path:
    """Return the name of a directory while commands make or remove it, when it is no
    device; ``tag`` is 16 hex digits."""
    return path.with_name(f".{path.name}.{tag}")


def name_of_half(path: Path) -> str | None:
    """Return the name whose half_path() this is; None when it is something else."""
    match = _HALF.fullmatch(path.name)
    return match[1] if match and path.is_dir() and not path.is_symlink() else None


def half_made(devices: Path) -> list[Path]:
    """Return the directories that commands make or remove, or did until they died."""
    return sorted(path for path in devices.glob(".*") if name_of_half(path))


def device_directories() -> Iterator[DeviceDirectory]:
    """Yield the directories of all devices, by name."""
    for path in sorted(devices_directory().glob("*")):
        if _NAME.fullmatch(path.name):
            yield DeviceDirectory(path)


def _cure(path: Path) -> str:
    if path.name == "state.json":
        return (
            f"move it away (mv {path} …); btrfs-ublk device recover {path.parent.name} "
            "then finds the device by its tag"
        )
    return "correct it by hand: its contents are stored nowhere else"


_FILES = RecordFormat(FORMAT_VERSION, StateError, _cure)
