"""Images of podman, CRI-O and buildah, whose files are those of volumes.

They look for images in further stores, which they only read: "additionalimagestores" in
storage.conf. This is one, in the form that containers/storage has for overlays:

    STORE/overlay-images/images.json    which images there are, and of what volumes
    STORE/overlay-images/ID/            manifest and config of one, as they are
    STORE/overlay-layers/layers.json    one layer for each image
    STORE/overlay/ID/diff               a symbolic link to the top layer in the volume
    STORE/overlay/l/LINK                another one to that, by the short name of it

Layers of volumes are whole trees, so an image has one layer here. It has neither the ID
nor the digest of any layer of that image, but ones that nothing else has: podman would
take it for what another image begins with.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.private_dirs import check_private, check_way, follow_own_link
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device.locks import lock_file
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.commit import BaseImage, find_base
from btrfs_ublk.image.documents import digest_of
from btrfs_ublk.image.reference import Reference, parse_name, parse_reference
from btrfs_ublk.kernel.new_file import write_new
from btrfs_ublk.volume.definition import image_access
from btrfs_ublk.volume.forks import LAYERS_DIRECTORY
from btrfs_ublk.volume.image import up_with_image

DEFAULT_STORE = Path("/var/lib/btrfs-ublk/podman")
_LOCK_TIMEOUT_S = 10.0
#: Key of an image's record, and of a layer's; podman ignores what it does not know.
_VOLUME = "btrfs-ublk-volume"
_IMAGES, _LAYERS, _OVERLAY = "overlay-images", "overlay-layers", "overlay"
_LISTS = {_IMAGES: "images", _LAYERS: "layers"}
_LINK_LETTERS = 26  # as podman's own


@dataclass(frozen=True, kw_only=True)
class PodmanImage:
    """An image that podman sees, and the volume that has its files."""

    volume: str
    names: Sequence[str]
    id: str
    tree: str  # where its files are, while the volume is up


_HINT = "name another one: --store DIRECTORY"


class PodmanStore:
    """The store in a directory, which is made when something is added."""

    def __init__(self, path: StrPath = DEFAULT_STORE) -> None:
        self.path = Path(os.path.abspath(path))

    def make(self) -> None:
        """Make the store, unless it is there. Raises BtrfsUblkError."""
        check_way(self.path, what="store", hint=_HINT)
        try:
            self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._check()
            with self._locked():
                for name, kind in _LISTS.items():
                    directory = self.path / name
                    directory.mkdir(mode=0o755, exist_ok=True)
                    # A signal may have come just before a lock was made.
                    if any(
                        not (directory / f"{kind}.{suffix}").exists()
                        for suffix in ("json", "lock")
                    ):
                        self._write(name, self._read(name))
                (self.path / _OVERLAY / "l").mkdir(
                    mode=0o755, parents=True, exist_ok=True
                )
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot make the store {self.path}: {error.strerror}",
                hint="choose another one with --store",
            ) from error

    def _check(self) -> None:
        """Raise BtrfsUblkError for a store that other users can change; it may be a
        symbolic link of this user's, or missing."""
        check_way(self.path, what="store", hint=_HINT)
        there = follow_own_link(self.path)
        check_private(there, what="store", hint=_HINT, missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = lock_file(self.path / ".lock", timeout_s=_LOCK_TIMEOUT_S)
        if lock is None:
            raise BtrfsUblkError(f"another command changes {self.path}")
        with lock:
            # A killed command has left the layers of ours without an image. NB: neither
            # ID nor digest says whose one is: with podman, too, the lowest layer of an
            # image has the same digits as both, and no image is directly upon it.
            used = {one.get("layer") for one in self._read(_IMAGES)}
            ours = {one["id"] for one in self._read(_LAYERS) if _VOLUME in one}
            self._drop_layers(ours - used)
            yield

    def _read(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name / f"{_LISTS[name]}.json"
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot read {path}: {error.strerror}",
                hint="run as root, or name a store of yours: --store DIRECTORY",
            ) from error
        except ValueError as error:
            raise BtrfsUblkError(f"{path} is no JSON: {error}") from error
        return [one for one in found if isinstance(one, dict)]

    def _write(self, name: str, records: list[dict[str, Any]]) -> None:
        directory, kind = self.path / name, _LISTS[name]
        data = json.dumps(records).encode()
        write_new(directory / f"{kind}.json", data, mode=0o644, replace=True)
        # A podman that runs reads the list again when another one has written here.
        lock = directory / f"{kind}.lock"
        with open(lock, "wb") as file:
            file.write(os.urandom(32).hex().encode())
        lock.chmod(0o644)

    def images(self) -> list[PodmanImage]:
        """Return the images, in the order of volumes. Raises BtrfsUblkError."""
        found = []
        for record in self._read(_IMAGES):
            link = self.path / _OVERLAY / str(record.get("layer")) / "diff"
            with suppress(KeyError, OSError):
                found.append(
                    PodmanImage(
                        volume=record[_VOLUME],
                        names=tuple(record["names"]),
                        id=record["id"],
                        tree=os.readlink(link),
                    )
                )
        return sorted(found, key=lambda one: one.volume)

    def add(
        self, volume: str, *, names: Sequence[str] = (), base: StrPath | None = None
    ) -> PodmanImage:
        """Have podman see the image of a volume that is up, by ``names``, or by that of
        which the volume was made. Its manifest and config are looked up there. Raises
        UsageError, RegistryError, InvalidImageError."""
        with up_with_image(volume, base) as up:
            chain_ids, mount, data_bytes = up.layers, up.mount, up.data_bytes
            name, access = up.name, image_access(up.definition)
        source = parse_name(name)
        if not names:
            if not isinstance(source, Reference):
                raise UsageError(
                    f"volume {volume!r} is of {name}, which is no name of a registry",
                    hint="choose one for podman: --name localhost/app:1",
                )
            names = [f"{source.place}:{source.tag}" if source.tag else name]
        for one in names:
            parse_reference(one)
        image = find_base(source, access, chain_ids)
        tree = mount / LAYERS_DIRECTORY / chain_ids[-1]
        self.make()
        with self._locked(), deferred():
            self._check_free(names, volume)
            return self._add(volume, names, image, tree, data_bytes)

    def _check_free(self, names: Sequence[str], volume: str) -> None:
        for record in self._read(_IMAGES):
            taken = set(names) & set(record.get("names", ()))
            if taken and record.get(_VOLUME) != volume:
                raise UsageError(
                    f"{min(taken)} is the image of volume {record.get(_VOLUME)!r}",
                    hint="choose another name with --name",
                )

    def _add(
        self,
        volume: str,
        names: Sequence[str],
        image: BaseImage,
        tree: Path,
        data_bytes: int,
    ) -> PodmanImage:
        # NB: not the ID that podman would give it: one that is pulled shall be another.
        number = hashlib.sha256(f"btrfs-ublk {volume} {tree.name}".encode()).hexdigest()
        link = base64.b32encode(bytes.fromhex(number)).decode()[:_LINK_LETTERS]
        manifest, config = digest_of(image.document), digest_of(image.config_data)
        blobs = {
            "manifest": image.document,
            f"manifest-{manifest}": image.document,
            config: image.config_data,
        }
        created = _created(image)
        layer = {
            "id": number,
            "created": created,
            # podman wants a digest where there is a size. NB: it is of nothing.
            "diff-digest": f"sha256:{number}",
            "diff-size": data_bytes,
            _VOLUME: volume,
        }
        record = {
            "id": number,
            "digest": manifest,
            "names": list(names),
            "layer": number,
            "created": created,
            "big-data-names": list(blobs),
            "big-data-sizes": {key: len(data) for key, data in blobs.items()},
            "big-data-digests": {key: digest_of(data) for key, data in blobs.items()},
            _VOLUME: volume,
        }
        records, layers = self._read(_IMAGES), self._read(_LAYERS)
        old = {one["id"] for one in records if one.get(_VOLUME) == volume}
        try:
            # NB: first, so that the next command finds what is left after a kill.
            self._write(_LAYERS, [*(x for x in layers if x["id"] != number), layer])
            documents = self.path / _IMAGES / number
            documents.mkdir(mode=0o755, exist_ok=True)
            for key, data in blobs.items():
                encoded = base64.b64encode(key.encode()).decode()
                path = documents / (key if key == "manifest" else f"={encoded}")
                write_new(path, data, mode=0o644, replace=True)
            overlay = self.path / _OVERLAY / number
            overlay.mkdir(mode=0o755, exist_ok=True)
            write_new(overlay / "link", link.encode(), mode=0o644, replace=True)
            for path, target in (
                (overlay / "diff", tree),
                (self.path / _OVERLAY / "l" / link, Path("..", number, "diff")),
            ):
                path.unlink(missing_ok=True)
                path.symlink_to(target)
            # NB: an image that is listed has its layer at each moment.
            self._write(_IMAGES, [*(x for x in records if x["id"] not in old), record])
            self._drop_layers(old - {number})
        except OSError as error:
            if number not in {one["id"] for one in self._read(_IMAGES)}:
                with suppress(OSError):
                    self._drop_layers({number})
            raise BtrfsUblkError(
                f"cannot write to {self.path}: {error.strerror}",
                hint="is its disk full, or read-only?",
            ) from error
        return PodmanImage(volume=volume, names=tuple(names), id=number, tree=str(tree))

    def remove(self, volume: str) -> None:
        """Have podman see the image of a volume no more. Raises UsageError, and
        BtrfsUblkError for a store that other users can change."""
        self._check()
        if (self.path / _IMAGES).is_dir():
            with self._locked(), deferred():
                if self._forget(volume):
                    return
        raise UsageError(
            f"podman sees no image of a volume {volume!r} in {self.path}",
            hint="see: btrfs-ublk podman list",
        )

    def _forget(self, volume: str) -> bool:
        records = self._read(_IMAGES)
        gone = {one["id"] for one in records if one.get(_VOLUME) == volume}
        if gone:
            self._write(_IMAGES, [one for one in records if one["id"] not in gone])
            self._drop_layers(gone)
        return bool(gone)

    @deferred()
    def _drop_layers(self, gone: set[str]) -> None:
        """Remove layers without an image. They are listed until all
        else has gone, or nobody would find it after a kill."""
        for number in gone:
            directory = self.path / _OVERLAY / number
            with suppress(OSError):
                link = (directory / "link").read_text()
                (self.path / _OVERLAY / "l" / Path(link).name).unlink()
            # NB: what a symbolic link leads to is not followed.
            shutil.rmtree(directory, ignore_errors=True)
            shutil.rmtree(self.path / _IMAGES / number, ignore_errors=True)
        layers = self._read(_LAYERS)
        kept = [one for one in layers if one["id"] not in gone]
        if kept != layers:
            self._write(_LAYERS, kept)


def _created(image: BaseImage) -> str:
    """Return when an image was made; podman wants a time."""
    found = image.config.get("created")
    with suppress(TypeError, ValueError):
        datetime.fromisoformat(str(found).replace("Z", "+00:00")[:19])
        return str(found)
    return datetime.fromtimestamp(0, timezone.utc).isoformat().replace("+00:00", "Z")
