"""What is mounted: /proc/self/mountinfo (proc_pid_mountinfo(5)), in this namespace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class MountInfo:
    """One mount. ``device`` is "major:minor"; btrfs' is anonymous, not the disk's."""

    mount_id: int
    device: str
    target: Path
    fs_type: str
    source: str
    read_only: bool


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), text)


def parse_mountinfo(text: str) -> list[MountInfo]:
    """The mounts listed, in the order of mounting: later ones cover earlier ones."""
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        # Optional fields stand between the sixth and a lone hyphen.
        fs_type, source = fields[fields.index("-", 6) + 1 :][:2]
        mounts.append(
            MountInfo(
                mount_id=int(fields[0]),
                device=fields[2],
                target=Path(_unescape(fields[4])),
                fs_type=fs_type,
                source=_unescape(source),
                read_only="ro" in fields[5].split(","),
            )
        )
    return mounts


def read_mountinfo() -> list[MountInfo]:
    """The mounts that this process sees."""
    # NB: bytes that are no UTF-8 may stand in paths; surrogates keep them.
    return parse_mountinfo(
        Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    )


def mounts_at_or_below(directory: Path) -> list[MountInfo]:
    """Those whose target is the directory or lies in it; the path must be resolved."""
    return [
        mount
        for mount in read_mountinfo()
        if mount.target == directory or directory in mount.target.parents
    ]
