"""The state of volumes, for people and programs. Nothing here changes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from btrfs_ublk import device as devices
from btrfs_ublk import kernel as resources
from btrfs_ublk import server as servers
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device.locks import is_locked
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.beneath import existing_beneath
from btrfs_ublk.kernel.btrfs import (
    TOP_LEVEL,
    filesystem_uuid,
    is_subvolume,
    opened_subvolume,
    subvolume_id,
    subvolume_time_s,
)
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.volume.device import explain_devices, find_device
from btrfs_ublk.volume.entry import SHOWN_FILES, describe_source
from btrfs_ublk.volume.mounts import is_mounted, is_read_only, mount_points
from btrfs_ublk.volume.store import (
    MadeFile,
    VolumeDirectory,
    volume_directories,
    volume_directory,
)

SNAPSHOTS_DIRECTORY = "snapshots"
#: "changing": a command works on it. "broken": partly up, or not whole. "damaged": its
#: files are not valid.
VolumeState = Literal["up", "down", "changing", "broken", "damaged"]


@dataclass(frozen=True, kw_only=True)
class KeptFile:
    """A file that was made in the volume. ``present``: whether there is a file at its
    path, changed or not; None while the volume is not mounted. ``cached_bytes`` of its
    content were fetched, and are in the cache; None where nobody was asked.
    """

    path: str
    origin: str
    offset: int
    size_bytes: int
    present: bool | None
    cached_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class KeptVolume:
    """A volume's state at one moment; sizes are bytes.

    ``reason`` says why it is neither up nor down. ``mount`` is its mount point, also
    when it is down. ``used_bytes`` is disk space used by written data, ``mapped_bytes``
    the size of all mappings. ``failing`` describes reads that failed since the server
    started, ``disk_problems`` maps and caches that cannot be written,
    ``complete`` how far the background completion is, ``snapshots`` the names of its
    snapshots, while it is up; all if asked. ``file_count`` is how many ``files`` it
    has, also where they were not looked at.
    """

    name: str
    state: VolumeState
    reason: str | None = None
    directory: Path
    mount: Path | None = None
    device: Path | None = None
    front_end: str | None = None
    fsid: str | None = None
    size_bytes: int | None = None
    writable_bytes: int | None = None
    used_bytes: int | None = None
    mapped_bytes: int | None = None
    failing: str | None = None
    disk_problems: list[str] = field(default_factory=list)
    complete: str | None = None
    snapshots: list[str] = field(default_factory=list)
    cache: Path | None = None
    files: list[KeptFile] = field(default_factory=list)
    file_count: int = 0
    trees: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        return self.state == "up"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        keys = asdict(self)
        return {
            key: str(value) if isinstance(value, Path) else value
            for key, value in keys.items()
        }


def _loop_files() -> list[Path]:
    return [file for _, file in loops_below(Path("/"))]


def list_volumes(
    *, base: StrPath | None = None, files: bool = True
) -> list[KeptVolume]:
    """List all volumes by name; without ``files``, these are only counted. No server is
    asked, so none can delay this."""
    loop_files = cache(_loop_files)  # there may be thousands of both
    most = None if files else 0
    volumes = [
        look_at_volume(directory, most_files=most, loop_files=loop_files)
        for directory in volume_directories(base)
    ]
    # One may have been removed meanwhile.
    return [volume for volume in volumes if volume.directory.exists()]


def show_volume(
    name: str, *, base: StrPath | None = None, files: bool = True
) -> KeptVolume:
    """Return the state of one volume; without ``files``, only with the first
    SHOWN_FILES of them. Takes up to 5 s when its server hangs. Raises UsageError when
    there is none of that name.
    """
    directory = volume_directory(name, base)
    directory.check()
    most = None if files else SHOWN_FILES
    return look_at_volume(directory, ask=True, most_files=most)


def look_at_volume(
    volume: VolumeDirectory,
    *,
    ask: bool = False,
    is_ours: bool = False,
    most_files: int | None = 0,
    loop_files: Callable[[], list[Path]] = _loop_files,
) -> KeptVolume:
    """Return its state; ``ask`` its server, and look at ``most_files`` of its files
    (None: all). ``is_ours``: the caller has the lock. ``loop_files`` says the files of
    all loop devices, for a caller who keeps them."""
    try:
        volume.check()
        count, files = volume.whole_files(most_files)
        found = replace(
            _look(volume, ask=ask, is_ours=is_ours, loop_files=loop_files),
            file_count=count,
        )
        return _with_files(found, files, ask=ask) if files else found
    except (BtrfsUblkError, OSError) as error:
        return KeptVolume(
            name=volume.name, state="damaged", reason=str(error), directory=volume.path
        )


def mount_of(volume: VolumeDirectory) -> Path:
    """Return where a volume, which the caller has locked, is up. Raises UsageError."""
    found = look_at_volume(volume, is_ours=True)
    if not found.is_up or found.mount is None:
        why = f" ({found.reason})" if found.reason else ""
        raise UsageError(
            f"volume {volume.name!r} is {found.state}{why}",
            hint=f"btrfs-ublk volume up {volume.name}",
        )
    return found.mount


def _look(
    volume: VolumeDirectory,
    *,
    ask: bool,
    is_ours: bool,
    loop_files: Callable[[], list[Path]],
) -> KeptVolume:
    made, session = volume.made(), volume.session()
    definition = volume.definition(files=False)
    device = find_device(volume, ask=ask)
    mount = volume.target_of(definition)
    if session is not None and session.is_of_this_boot:
        mount = Path(session.target)
    state, reason = _state_of(volume, device, mount, loop_files)
    if state != "up" and (rollback := volume.rollback()) is not None:
        told = f"its rollback to {rollback.snapshot!r} is completed when it is up again"
        reason = f"{reason}; {told}" if reason else told
    if not is_ours and is_locked(volume.lock):
        state, reason = "changing", "a command works on it"
    mapped_bytes = failing = complete = None
    disk_problems: list[str] = []
    if ask and device is not None and device.stats is not None:
        with suppress(BtrfsUblkError):
            stats = servers.ServerStats.parse(device.stats)
            failing = _failing(volume, device, stats)
            found = [lazy.complete.text() for lazy in stats.lazy if lazy.complete]
            complete = "; ".join(found) or None
            disk_problems = [each for x in stats.lazy for each in x.disk_problems()]
        with suppress(BtrfsUblkError):
            mapped_bytes = sum(
                devices.device_map(volume.name).stats()["bytes"].values()
            )
    snapshots: list[str] = []
    if ask and state == "up":
        with suppress(BtrfsUblkError):  # it may go down meanwhile
            snapshots = [one.name for one in list_snapshots(mount)]
    used_bytes = 0
    with suppress(FileNotFoundError):
        used_bytes = volume.sprout_image.stat().st_blocks * 512
    return KeptVolume(
        name=volume.name,
        state=state,
        reason=reason,
        directory=volume.path,
        mount=mount,
        device=device.path if device else None,
        front_end=device.spec.front_end if device and device.spec else None,
        fsid=made.fsid,
        size_bytes=made.size_bytes,
        writable_bytes=made.writable_bytes,
        used_bytes=used_bytes,
        mapped_bytes=mapped_bytes,
        failing=failing,
        disk_problems=disk_problems,
        complete=complete,
        snapshots=snapshots,
        cache=volume.cache_of(definition),
        trees=[tree.to_dict() for tree in volume.made_trees()],
    )


def _with_files(
    found: KeptVolume, files: Sequence[MadeFile], *, ask: bool
) -> KeptVolume:
    cached: dict[int, int] = {}
    if ask and found.mapped_bytes is not None and found.cache is not None:
        with suppress(BtrfsUblkError):
            cached = _cached_bytes(found.name, found.cache, files)
    there: set[str] = set()
    if found.mount is not None and found.is_up:
        with suppress(OSError), resources.opened_directory(found.mount) as top:
            there = existing_beneath(top, [one.path for one in files])
    return replace(
        found,
        files=[
            KeptFile(
                path=one.path,
                origin=describe_source(one.source),
                offset=one.offset,
                size_bytes=one.size_bytes,
                present=one.path in there if found.is_up else None,
                cached_bytes=(
                    min(cached[one.offset], one.size_bytes)
                    if one.size_bytes and one.offset in cached
                    else None
                ),
            )
            for one in files
        ],
    )


def _cached_bytes(
    name: str, directory: Path, files: Sequence[MadeFile]
) -> dict[int, int]:
    """Return how much of what is mapped is in the cache, by offset. Where there are
    many files, server and cache are asked once for all."""
    client = devices.device_map(name)
    if len(files) <= SHOWN_FILES:
        sources = {
            one.offset: client.show(offset=one.offset)["source"]
            for one in files
            if one.size_bytes
        }
        return {
            offset: source["cached_units"] * source["description"]["unit"]
            for offset, source in sources.items()
            if "cached_units" in source
        }
    with deferred():
        from btrfs_ublk.content.cache import Cache
    keys = {
        x["id"]: x.get("key") for x in client.sources() if x["digests"] != "computed"
    }
    there = {x.key: x.cached_bytes for x in Cache(directory).status().contents}
    return {
        mapping.offset: there.get(key, 0)
        for mapping in client.list()
        if (key := keys.get(mapping.source)) is not None
    }


def _failing(
    volume: VolumeDirectory, device: devices.Device, stats: servers.ServerStats
) -> str | None:
    """Describe failed reads; None when there are none."""
    count = stats.kinds["lazy"].errors if "lazy" in stats.kinds else 0
    if not count:
        return None
    fetchers = [lazy.fetcher for lazy in stats.lazy]
    reasons = Counter[str]()
    for fetcher in fetchers:
        reasons.update(fetcher.failures)
    hosts = {
        host or "local files"
        for fetcher in fetchers
        for host, about in fetcher.hosts.items()
        if about["failures"]
    }
    told = [f"{reason} {times}" for reason, times in reasons.most_common() if times]
    why = f" (requests: {', '.join(told)}" if told else ""
    if why:
        why += f"; to {', '.join(sorted(hosts))})" if hosts else ")"
    file = next(filter(None, (_file_of(volume, x.failed_source) for x in fetchers)), "")
    last = f", the last one of {file!r}" if file else ""
    return f"{count} reads failed{last}{why}; see {device.log}"


def _file_of(volume: VolumeDirectory, source: int) -> str | None:
    """Return the path of the file that was made of a source of the map; None where
    there is none, and where the server does not say."""
    files = volume.files().values()
    if not source or not files:
        return None
    with suppress(BtrfsUblkError):
        mappings = devices.device_map(volume.name).list()
        offset = next((one.offset for one in mappings if one.source == source), None)
        return next((x.path for x in files if x.offset == offset), None)
    return None


def _shows(mount: Path, fsid: UUID) -> bool:
    with suppress(BtrfsUblkError):
        return filesystem_uuid(mount) == fsid
    return False


def _state_of(
    volume: VolumeDirectory,
    device: devices.Device | None,
    mount: Path,
    loop_files: Callable[[], list[Path]],
) -> tuple[VolumeState, str | None]:
    fsid, session = volume.fsid(), volume.session()
    was_to_be_up = session is not None and session.is_of_this_boot
    if device is None and not was_to_be_up:
        if not any(volume.path in file.parents for file in loop_files()):
            return "down", None
    if fsid is None or not is_mounted(fsid):
        if device is None and not was_to_be_up:
            return "down", None
        return (
            "broken",
            "it is not mounted: a command was killed, or it was unmounted by hand; to "
            f"repair it: btrfs-ublk volume up {volume.name} (or volume down)",
        )
    if not _shows(mount, fsid):  # the list of all mounts may be long
        points = mount_points(fsid)
        if not points:
            return "broken", "it is mounted in another mount namespace only"
        if mount not in points:
            return "broken", f"it is mounted at {points[0]}, and not at {mount}"
    if device is None:
        return (
            "broken",
            "its device does not exist any more, though the volume is still mounted",
        )
    if not device.is_well:
        why = f": {device.reason}" if device.reason else ""
        return "broken", f"its device is {device.health}{why}"
    if wrong := explain_devices(volume, device):
        return "broken", wrong
    if is_read_only(mount):
        return "broken", "it is read-only: see the kernel log (dmesg | grep -i btrfs)"
    return "up", None


@dataclass(frozen=True, kw_only=True)
class VolumeSnapshot:
    """A snapshot of a volume. ``time_s`` is when it was made, in seconds since 1970; of
    one that a rollback has kept, when it was last changed. ``subvolume`` is its number.
    """

    name: str
    time_s: int
    subvolume: int


def can_have_snapshots(mount: Path) -> bool:
    """Whether a subvolume is mounted there: of images and of volumes of early versions,
    it is the top level. Raises BtrfsUblkError."""
    return subvolume_id(mount) != TOP_LEVEL


@contextmanager
def opened_snapshots(mount: Path) -> Iterator[Path]:
    """Yield a path to the directory of snapshots, valid in the block. It may not be
    there yet. Raises BtrfsUblkError."""
    with opened_subvolume(mount, TOP_LEVEL) as top:
        yield top / SNAPSHOTS_DIRECTORY


def list_snapshots(mount: Path) -> list[VolumeSnapshot]:
    """Return the snapshots of a mounted volume, the oldest first; none of one that can
    have none. Raises BtrfsUblkError."""
    if not can_have_snapshots(mount):
        return []
    with opened_snapshots(mount) as directory:
        found = [
            look_at_snapshot(x)
            for x in subvolumes_in(directory)
            if not x.name.startswith(".")
        ]
    return sorted(found, key=lambda one: (one.time_s, one.name))


def look_at_snapshot(path: Path) -> VolumeSnapshot:
    return VolumeSnapshot(
        name=path.name, time_s=subvolume_time_s(path), subvolume=subvolume_id(path)
    )


def subvolumes_in(directory: Path) -> list[Path]:
    return [x for x in directory.glob("*") if is_subvolume(x)]
