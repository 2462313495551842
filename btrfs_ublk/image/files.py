"""What the files of an image layout in a store can be asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.documents import Descriptor
from btrfs_ublk.image.repository import Progress


class Found(NamedTuple):
    """A small file. ``version`` is what the store knows this content by (ETag)."""

    data: bytes
    version: str | None


class Files(ABC):
    """Files below a URL. ``place`` is its name. All methods raise RegistryError."""

    place: str

    def close(self) -> None:
        """End all connections."""

    @abstractmethod
    def read(self, name: str) -> Found | None:
        """Return a document; None where there is none."""

    @abstractmethod
    def has(self, name: str) -> bool: ...

    @abstractmethod
    def rest(self, name: str, one: Descriptor, done: int) -> Iterator[bytes]:
        """As Repository._rest()."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, as a whole."""
        raise self.refuse_writing()

    def replace(self, name: str, data: bytes, version: str | None) -> bool:
        """Write a file of which the caller has seen ``version``, or that was not there
        (None). Returns whether that was still so; if not, nothing is written."""
        raise self.refuse_writing()

    def upload(self, name: str, path: Path, progress: Progress) -> None:
        """Write a large file, as a whole, in pieces."""
        raise self.refuse_writing()

    def refuse_writing(self) -> UsageError:
        return UsageError(
            f"{self.place} is a web server, which is only read",
            hint="build into the directory that it serves: btrfs-ublk image build -o "
            "DIRECTORY; or copy a layout there, index.json last",
        )
