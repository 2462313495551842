"""What versions of an image a repository has, and what is new in each."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from btrfs_ublk.content.digests import Digests
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.diff import new_bytes
from btrfs_ublk.image.documents import (
    SealedManifest,
    choose_platform,
    descriptors,
    is_index,
    manifests_of,
    parse_document,
)
from btrfs_ublk.image.pack import read_digests
from btrfs_ublk.image.places import open_repository
from btrfs_ublk.image.pull import NotSealedError, look_up
from btrfs_ublk.image.reference import Reference
from btrfs_ublk.image.repository import Repository
from btrfs_ublk.image.store import ImageStore

#: A list of referrers, or a signature: both are tags that are made of a digest.
_NO_VERSION = re.compile(r"sha256-[0-9a-f]{64}.*")


@dataclass
class Version:
    """A tag of a repository. ``kind`` is sealed, indexed or ordinary; None when
    ``problem`` says why it cannot be told. ``data_bytes`` are those of the data object,
    or of the layers. ``new_bytes`` are what a host that has the version before still
    has to fetch to have all: the metadata pack, and units or layers; None when that was
    not asked for, or cannot be told."""

    tag: str
    digest: str | None = None
    kind: str | None = None
    sealed: str | None = None
    pack_bytes: int | None = None
    data_bytes: int | None = None
    new_bytes: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Catalogue:
    """The last versions of a repository, of ``tags`` in all."""

    repository: str
    tags: int
    versions: list[Version]


def list_versions(
    place: Reference,
    access: RegistryAccess,
    *,
    last: int,
    with_new: bool = False,
    expect: Callable[[int], object] = lambda total: None,
    progress: Callable[[int], object] = lambda count: None,
) -> Catalogue:
    """List the ``last`` tags of a repository, in the order of the numbers in them. A
    handful of requests for each; ``with_new`` gets each one's metadata pack as well,
    but those that this machine has. Raises RegistryError, InvalidImageError when the
    tags cannot be had; what is wrong with one version stands in it."""
    with open_repository(place, access) as repository:
        tags = sorted(
            (x for x in repository.tags() if not _NO_VERSION.fullmatch(x)), key=_order
        )
        lister = _Lister(repository, place, with_new)
        versions = []
        expect(len(tags[-last:]))
        for tag in tags[-last:]:
            versions.append(lister.look_at(tag))
            progress(1)
    return Catalogue(place.place, len(tags), versions)


def _order(tag: str) -> list[tuple[int, str]]:
    """Order by the numbers in tags: 1.9, 1.10, 1.10-rc."""
    parts = re.split(r"(\d+)", tag)
    return [(int(x), "") if x.isdigit() else (-1, x) for x in parts]


@dataclass
class _Lister:
    """Keeps what the version before has: the digests of its units, if it is sealed,
    else those of its layers."""

    repository: Repository
    place: Reference
    with_new: bool
    _kind: str | None = None
    _sealed: str | None = None
    _units: Digests | None = None
    _blobs: frozenset[str] = frozenset()

    def look_at(self, tag: str) -> Version:
        version = Version(tag)
        try:
            self._fill(version)
        except BtrfsUblkError as error:
            version.problem, version.kind = error.message, None
        return version

    def _fill(self, version: Version) -> None:
        reference = replace(self.place, tag=version.tag)
        try:
            document, _, sealed = look_up(reference, self.repository)
        except NotSealedError:
            document = self.repository.document(version.tag)
            version.digest, version.kind = document.digest, "ordinary"
            self._fill_layers(version, document.data)
            return
        version.digest, version.sealed = document.digest, sealed.digest
        version.pack_bytes = sealed.pack.size
        if sealed.subject is not None:
            version.kind = "indexed"
            subject = self.repository.document(sealed.subject.digest)
            self._fill_layers(version, subject.data)
            return
        version.kind, version.data_bytes = "sealed", sealed.data_bytes
        if not self.with_new:
            return
        if self._sealed == sealed.digest:
            version.new_bytes = 0
            return
        units = self._digests(sealed)
        old = self._units if self._kind == "sealed" else None
        self._kind, self._sealed, self._units = "sealed", sealed.digest, units
        version.new_bytes = sealed.pack.size + new_bytes(old, units)

    def _fill_layers(self, version: Version, manifest: bytes) -> None:
        where = f"{self.place.place}:{version.tag}"
        document = parse_document(manifest, where)
        if is_index(document):
            manifests = manifests_of(
                document, where, lambda one: self.repository.document(one.digest).data
            )
            one = choose_platform(manifests, None, where)
            document = parse_document(
                self.repository.document(one.digest).data, one.digest
            )
        layers = {x.digest: x.size for x in descriptors(document, "layers", where)}
        version.data_bytes = sum(layers.values())
        if self.with_new:
            known = self._blobs if self._kind == version.kind else frozenset()
            self._kind, self._blobs = version.kind, frozenset(layers)
            new = sum(size for one, size in layers.items() if one not in known)
            pack_bytes = 0 if self._sealed == version.sealed else version.pack_bytes
            self._sealed = version.sealed
            version.new_bytes = new + (pack_bytes or 0)

    def _digests(self, sealed: SealedManifest) -> Digests:
        """Return the digests of an image's units, of a pack that is here if it is."""
        stored = ImageStore().find(sealed.digest)
        if stored is not None:
            return read_digests(stored.pack)[1]
        with tempfile.TemporaryDirectory(prefix="btrfs-ublk-") as directory:
            pack = Path(directory, "pack")
            self.repository.download(sealed.pack, pack)
            return read_digests(pack)[1]
