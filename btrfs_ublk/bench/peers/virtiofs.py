"""virtiofs: a file of the host, in a guest. Whoever started the guest has decided how
the host reads and caches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.stamps import STAMPS, write_content
from btrfs_ublk.capabilities import Capability
from btrfs_ublk.resources.mountinfo import read_mountinfo
from btrfs_ublk.resources.tempdir import tempdir


@dataclass(frozen=True)
class _WritableMount:
    name: ClassVar[str] = "virtiofs"
    cure: ClassVar[str] = "run this in a VM: scripts/vm"

    def target(self) -> Path | None:
        """Where one is mounted that can be written to."""
        mounts = (x for x in read_mountinfo() if x.fs_type == "virtiofs")
        return next((x.target for x in mounts if not x.read_only), None)

    def probe(self) -> str | None:
        return None if self.target() else "nothing of it is mounted writable here"


VIRTIOFS = _WritableMount()


@dataclass(frozen=True)
class Virtiofs:
    name: ClassVar[str] = "virtiofs"
    layer: ClassVar[Literal["file"]] = "file"
    description: ClassVar[str] = "a file of the host through virtiofs"
    needs: ClassVar[Sequence[Capability]] = (VIRTIOFS,)

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        with tempdir(parent=VIRTIOFS.target()) as directory:
            path = directory / "file"
            write_content(path, STAMPS, setting.size_bytes)
            yield Subject(path, STAMPS, writable=True)


PEERS: Sequence[Peer] = [Virtiofs()]
