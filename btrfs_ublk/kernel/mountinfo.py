"""Read which mounts a process sees (/proc/PID/mountinfo, proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from btrfs_ublk.base.records import dataclass

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class MountInfo:
    """One mount. ``device`` is "major:minor"; btrfs' is anonymous, not the disk's.
    ``root`` is the directory of the file system that is mounted. ``propagation`` are
    words like "shared:1" and "master:2" (mount_namespaces(7)). ``read_only`` is the
    mount; ``fs_read_only`` the file system, for all of its mounts.
    """

    mount_id: int
    parent_id: int
    device: str
    root: Path
    target: Path
    propagation: tuple[str, ...]
    fs_type: str
    source: str
    read_only: bool
    fs_read_only: bool


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), text)


def parse_mountinfo(text: str) -> list[MountInfo]:
    """Return the mounts in the order of the list: later ones cover earlier ones."""
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        # Optional fields are between the sixth and a lone hyphen.
        hyphen = fields.index("-", 6)
        fs_type, source, options = fields[hyphen + 1 :][:3]
        mounts.append(
            MountInfo(
                mount_id=int(fields[0]),
                parent_id=int(fields[1]),
                device=fields[2],
                root=Path(_unescape(fields[3])),
                target=Path(_unescape(fields[4])),
                propagation=tuple(fields[6:hyphen]),
                fs_type=fs_type,
                source=_unescape(source),
                read_only="ro" in fields[5].split(","),
                fs_read_only="ro" in options.split(","),
            )
        )
    return mounts


def read_mountinfo(
    process: int | str = "self",
    *,
    fs_type: str | None = None,
    marks: Collection[str] = (),
) -> list[MountInfo]:
    """Return the mounts that this process, or one of that id, sees; all, or those of a
    type, or those whose lines have one of these texts. Raises OSError."""
    lines = _read_text(process).splitlines()
    # NB: parsing takes long where there are thousands of mounts.
    if fs_type is not None:
        lines = [line for line in lines if f" - {fs_type} " in line]
    if marks:
        lines = [line for line in lines if any(mark in line for mark in marks)]
    found = parse_mountinfo("\n".join(lines))
    return [mount for mount in found if fs_type in (None, mount.fs_type)]


def mounts_at(target: Path) -> list[MountInfo]:
    """Return the mounts on a directory, the topmost last. Its path must be resolved."""
    found = read_mountinfo(marks=[f" {_escape(target)} "])
    return [mount for mount in found if mount.target == target]


def _escape(path: Path) -> str:
    """Return a path as it is in a line, and the beginning of paths below it."""
    return str(path).translate({ord(x): f"\\{ord(x):03o}" for x in " \t\n\\"})


def _read_text(process: int | str) -> str:
    # NB: paths may have bytes that are not UTF-8; surrogates preserve them.
    return Path(f"/proc/{process}/mountinfo").read_text(errors="surrogateescape")


def texts_elsewhere() -> Iterator[tuple[int, str]]:
    """Yield, for each other mount namespace, a process in it and the mounts it sees,
    for parse_mountinfo().

    Namespaces that this process may not look into are left out.
    """
    seen = {os.readlink("/proc/self/ns/mnt")}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it ended, or we may not look
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in seen:
                text = _read_text(pid)
                seen.add(namespace)
                yield int(pid), text


def mounts_at_or_below(*directories: Path) -> list[MountInfo]:
    """Return the mounts on directories and below them. Their paths must be resolved."""
    marks = [f" {_escape(each)}" for each in directories]
    return [
        mount
        for mount in read_mountinfo(marks=marks)
        if any(mount.target.is_relative_to(each) for each in directories)
    ]
