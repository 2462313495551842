"""Files of others' file systems: virtiofs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from btrfs_ublk.base.capabilities import Probed
from btrfs_ublk.bench.content import STAMPS, write_content
from btrfs_ublk.bench.peer import Setting, Subject, peer
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.temporary import tempdir


def _virtiofs_target() -> Path | None:
    """Return where a writable one is mounted."""
    mounts = (x for x in read_mountinfo() if x.fs_type == "virtiofs")
    return next((x.target for x in mounts if not x.read_only), None)


_VIRTIOFS = Probed(
    "virtiofs",
    "run this in a VM: scripts/vm",
    lambda: None if _virtiofs_target() else "nothing of it is mounted writable here",
)


@peer("virtiofs", "file", "a file of the host through virtiofs", (_VIRTIOFS,))
def _virtiofs(setting: Setting) -> Iterator[Subject]:
    """The host's caching depends on how the guest was started."""
    with tempdir(parent=_virtiofs_target()) as directory:
        path = directory / "file"
        write_content(path, STAMPS, setting.size_bytes)
        yield Subject(path, STAMPS, writable=True)


PEERS = [_virtiofs]
