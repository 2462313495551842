"""The seed of a volume of a sealed image: from the image's metadata pack, which may be
on its way while the device is made.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fcntl import ioctl
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from btrfs_ublk.base.log import log, step
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.content import SourceKeys
from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.documents import DATA_OFFSET, SealedManifest, Start
from btrfs_ublk.image.layout import Layout, blob_name
from btrfs_ublk.image.policy import Policy
from btrfs_ublk.image.pull import Pull, open_sealed, pulling
from btrfs_ublk.image.reference import LayoutName, Name, Reference, parse_name
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.image.traces import parse_trace
from btrfs_ublk.units import BLOCK_BYTES
from btrfs_ublk.volume.definition import VolumeDefinition, image_access
from btrfs_ublk.volume.store import VolumeDirectory

if TYPE_CHECKING:
    from btrfs_ublk.content.digests import Digests
    from btrfs_ublk.image.pack import PackHeader
    from btrfs_ublk.seed.layout import Seed

#: BLKFLSBUF of linux/fs.h, which Python lacks.
_BLKFLSBUF = 0x1261
#: Since when a tag may well name another image.
_OLD_S = 86400.0
DIGESTS = "digests"
#: What is loaded while the first answers are on their way, as it is needed next.
_NEXT = (
    *("btrfs_ublk.server.description", "btrfs_ublk.device.lifecycle"),
    *("btrfs_ublk.content.maps", "btrfs_ublk.content.digests", "btrfs_ublk.image.pack"),
)


def load_next() -> None:
    for module in _NEXT:
        import_module(module)


@dataclass(frozen=True)
class FoundImage:
    """The image of a new volume: the digest of its manifest, where its
    data are (None: it has none), and how many bytes the manifest says they have. Its
    pack is there, or on its way (``pull``). Of an indexed image, ``layer`` says where
    the layer of a digest is.
    """

    name: str
    digest: str
    mirror: SourceKeys | None
    data_bytes: int
    layer: Callable[[str], SourceKeys] | None = None
    stored: Path | None = None
    pull: Pull | None = None
    stored_trace: Sequence[Sequence[int]] = ()
    first: Sequence[Sequence[int]] = ()

    def pack(self) -> Path:
        """The verified pack; waits for it."""
        if self.pull is None:
            assert self.stored is not None
            return self.stored
        with step(f"pull {self.name}"):
            return self.pull.pack()

    @property
    def trace(self) -> Sequence[Sequence[int]]:
        """The extents of the data that a start has read, as far as they are known."""
        return (self.pull.trace if self.pull else self.stored_trace) or self.first

    @property
    def _start(self) -> Start | None:
        start = self.pull.start if self.pull else None
        return start if start and start.data_bytes == self.data_bytes else None

    def prepare(self) -> None:
        """Wait for what begin() needs."""
        if self._start is None:
            self.pack()

    def begin(self, volume: VolumeDirectory) -> tuple[Seed, dict[str, Any]]:
        """Write what a device needs of the seed of a volume that is being made: all, or
        no more than a file of its size while the pack is on its way, until complete().
        Returns the seed, and what volume.json has of the image. Raises
        InvalidPackError, OSError."""
        from btrfs_ublk.content.digests import Digests

        start = self._start
        if start is None:
            return self._unpack(volume, None)
        with open(volume.seed_image, "xb") as seed:
            seed.truncate(start.local_bytes)
        digests = Digests(start.data_bytes, start.unit, start.digests)
        digests.write(volume.path / DIGESTS)
        return _seed_of(start, volume.seed_image), self._record(start, digests.root) | {
            "pending": True
        }

    def complete(self, volume: VolumeDirectory, device: Path) -> None:
        """Write what begin() has left out. Raises InvalidPackError, OSError."""
        made = volume.made()
        if not made.is_pending:
            return
        seed, image = self._unpack(volume, made.image)
        with open(volume.seed_image, "rb") as file, open(device, "rb") as opened:
            os.fsync(file.fileno())
            # Other programs look at new devices, and the kernel keeps what they saw.
            ioctl(opened, _BLKFLSBUF)
        volume.write_made(replace(made, seed=seed.to_dict(), image=image))

    def keep(self) -> None:
        """Put a pack that has come into the store of images."""
        if self.pull is not None:
            self.pull.keep(ImageStore())

    def _unpack(
        self, volume: VolumeDirectory, begun: dict[str, Any] | None
    ) -> tuple[Seed, dict[str, Any]]:
        # What unpacks takes long to load, and the pack is on its way meanwhile.
        from btrfs_ublk.image.pack import InvalidPackError, check_data, unpack

        def is_as_begun(header: PackHeader) -> None:
            expected = self._record(header, header.root) | {"pending": True}
            before = volume.seed()
            seed = replace(
                _seed_of(header, before.path),
                metadata_bytes=before.metadata_bytes,
                strategy=before.strategy,
            )
            if expected != begun or seed != before:
                raise InvalidPackError("its manifest says something else of it")

        check = None if begun is None else is_as_begun
        header, digests = unpack(self.pack(), volume.seed_image, check=check)
        check_data(header, self.data_bytes, indexed=self.layer is not None)
        if begun is None:
            digests.write(volume.path / DIGESTS)
        return _seed_of(header, volume.seed_image), self._record(
            header, header.root
        ) | {
            "config": header.config.get("config"),
            **({"trace": self.trace} if self.trace else {}),
            "layers": [layer.chain_id for layer in header.layers],
            **self._sources(header, digests, volume.path),
        }

    def _record(self, about: PackHeader | Start, root: str) -> dict[str, Any]:
        """Return what volume.json has from the beginning on."""
        source = None
        if self.mirror is not None:
            source = self.mirror | {
                "size": about.data_bytes,
                "unit": about.unit,
                "root": root,
            }
        return {
            "name": self.name,
            "digest": self.digest,
            "source": source,
            "first_bytes": about.first_bytes,
            "config": None,
            "layers": [],
        }

    def _sources(
        self, header: PackHeader, digests: Digests, directory: Path
    ) -> dict[str, Any]:
        """Return the sources of an indexed image, with their offsets in its data."""
        if self.layer is None:
            return {}
        sources = []
        for number, one in enumerate(header.sources):
            units = digests.part(one.offset, one.data_bytes)
            units.write(directory / f"{DIGESTS}.{number}")
            source = self.layer(one.layer) | {
                "unit": header.unit,
                "root": units.root,
                "codec": one.codec,
            }
            sources.append(
                {"offset": one.offset, "length": one.data_bytes, "source": source}
            )
        return {"sources": sources}


def _seed_of(about: PackHeader | Start, path: Path) -> Seed:
    from btrfs_ublk.physmap.physical_map import ContiguousRun
    from btrfs_ublk.seed.layout import Seed, VirtualData

    size_bytes = max(about.data_bytes, BLOCK_BYTES)
    extents = () if isinstance(about, Start) else about.extents
    return Seed(
        path=path,
        fsid=UUID(about.fsid),
        device_uuid=UUID(int=0),
        label="",
        device_bytes=about.device_bytes,
        file_bytes=about.local_bytes,
        metadata_bytes=sum(length for _, length in extents),
        local_bytes=about.local_bytes,
        virtual_data=VirtualData(
            filename="",
            inode=0,
            size=size_bytes,
            runs=(ContiguousRun(0, DATA_OFFSET, size_bytes),),
        ),
        chunks=1,
        chunk_bytes=size_bytes,
        strategy="image",
    )


@contextmanager
def finding(
    name: Name,
    access: RegistryAccess,
    *,
    policy: Policy | None = None,
    listed_in: Reference | None = None,
) -> Iterator[FoundImage]:
    """Find an image whose metadata are on this machine, or begin to fetch them, see
    pulling(). Raises UsageError, RegistryError, InvalidImageError, RefusedImageError.
    """
    if isinstance(name, LayoutName):
        layout, manifest, _ = open_sealed(name)
        mirror = None
        if manifest.data is not None:
            path = layout.check(manifest.data)
            mirror = {"kind": "file", "path": str(path)}
        yield FoundImage(
            str(name),
            manifest.digest,
            mirror,
            manifest.data_bytes,
            _layer_of(layout) if manifest.subject else None,
            layout.verify(manifest.pack),
            first=parse_trace(manifest.first) or (),
        )
        return

    store = ImageStore()

    def found(
        manifest: SealedManifest, pack: Path | None, pull: Pull | None = None
    ) -> FoundImage:
        def blob(digest: str) -> SourceKeys:
            return _source_of(name, digest, access)

        return FoundImage(
            str(name),
            manifest.digest,
            blob(manifest.data.digest) if manifest.data else None,
            manifest.data_bytes,
            blob if manifest.subject else None,
            pack,
            pull,
            () if pull else store.trace(manifest.digest),
            parse_trace(manifest.first) or (),
        )

    with store.holding(str(name)) as stored:
        if stored is not None:
            _warn_of_age(name, store)
            yield found(store.manifest(stored.digest), stored.pack)
            return
    with pulling(name, access, store, policy=policy, listed_in=listed_in) as pull:
        if pull.stored is None:
            yield found(pull.sealed, None, pull)
        else:
            pull.keep(store)
            yield found(pull.sealed, pull.stored.pack)


@contextmanager
def beginning_image(
    definition: VolumeDefinition,
    *,
    policy: Policy | None = None,
    listed_in: Reference | None = None,
) -> Iterator[Callable[[], FoundImage]]:
    """Find the image of a new volume in a thread, so that the first requests go out
    while other things are done. Yields a function that waits for it, and raises as
    finding() does."""
    assert definition.image is not None
    image, access = parse_name(definition.image), image_access(definition)
    if isinstance(image, Reference) and image.is_in_registry:
        # NB: what is loaded by two threads at once takes as long as both.
        import btrfs_ublk.image.registry  # noqa: F401
    found: list[FoundImage | BaseException] = []
    lock, is_over = threading.Lock(), False
    with ExitStack() as stack:

        def find() -> None:
            try:
                with ExitStack() as own:
                    one = finding(image, access, policy=policy, listed_in=listed_in)
                    found.append(own.enter_context(one))
                    with lock:
                        if not is_over:
                            stack.push(own.pop_all())
            except BaseException as error:
                found.append(error)

        def wait() -> FoundImage:
            load_next()
            thread.join()
            if isinstance(found[0], BaseException):
                raise found[0]
            found[0].prepare()
            return found[0]

        thread = threading.Thread(target=find, daemon=True)
        thread.start()
        try:
            yield wait
        finally:
            with lock:
                is_over = True


def _warn_of_age(name: Reference, store: ImageStore) -> None:
    """Say so when a tag was looked up long ago: to ask for it would take the time that
    an image which is here saves, and needs the registry."""
    at_s = store.pulled_s(str(name))
    if name.digest is None and at_s is not None and time.time() - at_s > _OLD_S:
        log.warning(
            "%s is what the tag named at %s; to ask again: btrfs-ublk image pull",
            name,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s)),
        )


def find_named_image(name: Name, access: RegistryAccess) -> FoundImage:
    """Return an image, whose metadata are fetched if they are not on this machine.
    Raises as finding() does."""
    with finding(name, access) as found:
        found.keep()
        if found.pull is None:
            return found
    with finding(name, access) as found:
        return found


def _source_of(name: Reference, digest: str, access: RegistryAccess) -> SourceKeys:
    """Return where a blob of an image is, as a map is told of it."""
    if name.is_in_registry:
        return {
            "kind": "oci",
            "registry": name.registry,
            "repository": name.repository,
            "digest": digest,
            **access.keys(),
        }
    keys: SourceKeys = {"ca_file": str(access.ca_file)} if access.ca_file else {}
    if name.is_in_bucket:
        from btrfs_ublk.content.s3 import s3_keys

        key = f"{name.repository}/{blob_name(digest)}"
        return {"kind": "s3", "bucket": name.bucket, "key": key, **s3_keys(), **keys}
    return {"kind": "http", "url": f"{name.place}/{blob_name(digest)}", **keys}


def _layer_of(layout: Layout) -> Callable[[str], SourceKeys]:
    def layer(digest: str) -> SourceKeys:
        path = layout.blob(digest)
        if not path.is_file():
            raise UsageError(
                f"the data of the image are in layer {digest}, which {layout.path} "
                "has not",
                hint="push it to the registry that has the layers, and name it there: "
                "btrfs-ublk image push; or index it into the layout that has the "
                "layers, with another --tag",
            )
        return {"kind": "file", "path": str(path)}

    return layer
