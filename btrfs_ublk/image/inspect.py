"""What is in a sealed image, and what it costs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.documents import SealedManifest
from btrfs_ublk.image.pack import PackHeader, read_header
from btrfs_ublk.image.places import open_repository
from btrfs_ublk.image.pull import look_up, open_sealed
from btrfs_ublk.image.reference import LayoutName, Name


@dataclass(frozen=True)
class ImageReport:
    """A sealed image: its manifest, and what its metadata pack says."""

    name: str
    manifest: SealedManifest
    header: PackHeader

    @property
    def metadata_bytes(self) -> int:
        return sum(length for _, length in self.header.extents)

    @property
    def platform(self) -> str:
        keys = ("os", "architecture", "variant")
        config = self.header.config
        return "/".join(str(config[key]) for key in keys if config.get(key)) or "-"

    def to_dict(self) -> dict[str, Any]:
        """What fits in JSON."""
        return {
            "name": self.name,
            "digest": self.manifest.digest,
            "platform": self.platform,
            "fsid": self.header.fsid,
            "pack_bytes": self.manifest.pack.size,
            "metadata_bytes": self.metadata_bytes,
            "data_bytes": self.header.data_bytes,
            "first_bytes": self.header.first_bytes,
            "data_digest": self.manifest.data.digest if self.manifest.data else None,
            "unit_bytes": self.header.unit,
            "root": self.header.root,
            "layers": [vars(layer) for layer in self.header.layers],
            "subject": self.manifest.subject.digest if self.manifest.subject else None,
            "sources": [vars(source) for source in self.header.sources],
        }


def inspect_image(name: Name, access: RegistryAccess) -> ImageReport:
    """Look at an image of a layout or a registry; nothing of it is used otherwise.
    Raises UsageError, RegistryError, InvalidImageError, InvalidPackError."""
    if isinstance(name, LayoutName):
        layout, manifest, _ = open_sealed(name)
        header = read_header(layout.verify(manifest.pack))
        return ImageReport(str(name), manifest, header)
    with (
        open_repository(name, access) as repository,
        tempfile.TemporaryDirectory() as new,
    ):
        _, _, manifest = look_up(name, repository)
        pack = Path(new, "pack")
        repository.download(manifest.pack, pack)
        return ImageReport(str(name), manifest, read_header(pack))
