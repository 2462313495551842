"""What commands print of volumes and forks: as text for people, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from btrfs_ublk.base.text import table, visible
from btrfs_ublk.units import exact_size, format_size
from btrfs_ublk.volume.entry import SHOWN_FILES

if TYPE_CHECKING:
    from btrfs_ublk.volume.forks import Fork
    from btrfs_ublk.volume.report import KeptVolume


def _exact(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else exact_size(size_bytes)


def _rough(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def volumes_text(volumes: Sequence[KeptVolume], *, as_json: bool) -> str:
    if as_json:
        return json.dumps([volume.to_dict() for volume in volumes], indent=2)
    rows = [("NAME", "STATE", "MOUNT", "DEVICE", "SIZE", "USED", "FILES")]
    for volume in volumes:
        rows.append(
            (
                volume.name,
                volume.state,
                str(volume.mount or "-"),
                str(volume.device or "-"),
                _exact(volume.size_bytes),
                _rough(volume.used_bytes),
                str(volume.file_count),
            )
        )
    return table(rows)


def volume_text(volume: KeptVolume, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(volume.to_dict(), indent=2)
    lines: list[tuple[str, object]] = [("state", volume.state)]
    if volume.reason:
        lines.append(("because", volume.reason))
    if volume.failing:
        lines.append(("failing", volume.failing))
    lines += [("disk", problem) for problem in volume.disk_problems]
    lines += [
        ("mount", volume.mount or "-"),
        ("device", volume.device or "-"),
        ("front end", volume.front_end or "-"),
        ("fsid", volume.fsid or "-"),
        ("virtual data", _exact(volume.size_bytes)),
        ("mapped", _rough(volume.mapped_bytes)),
        ("writable", _exact(volume.writable_bytes)),
        ("used", _rough(volume.used_bytes)),
        ("cache", volume.cache or "-"),
        *([("complete", volume.complete)] if volume.complete else []),
        *([("snapshots", " ".join(volume.snapshots))] if volume.snapshots else []),
        ("kept in", volume.directory),
    ]
    for tree in volume.trees:
        size = f"{tree['files']} files, {format_size(tree['size_bytes'])}"
        lines.append(("tree", f"{tree['path']}: {size} from {tree['origin']}"))
    for file in volume.files[:SHOWN_FILES]:
        gone = ", removed since" if file.present is False else ""
        size = format_size(file.size_bytes)
        if file.cached_bytes is not None:
            size = f"{format_size(file.cached_bytes)} of {size} are here,"
        lines.append(("file", f"{file.path}: {size} from {file.origin}{gone}"))
    if (more := volume.file_count - SHOWN_FILES) > 0:
        lines.append(("", f"and {more} more: --json has all"))
    return visible("\n".join(f"{name:14} {value}" for name, value in lines))


def fork_text(keys: dict[str, str], *, as_json: bool) -> str:
    """``keys`` are of a fork that was made."""
    return json.dumps(keys) if as_json else keys["path"]


def forks_text(forks: Sequence[Fork], *, as_json: bool) -> str:
    if as_json:
        return json.dumps([each.to_dict() for each in forks], indent=2)
    rows = [("FORK", "MODE", "USED", "QUOTA", "PATH")]
    for each in forks:
        path = visible(str(each.path)) + ("" if each.is_mounted else " (not mounted)")
        sizes = (_rough(each.used_bytes), _rough(each.quota_bytes))
        rows.append((visible(each.name), each.mode, *sizes, path))
    return table(rows)
