"""Sealed images that containerd starts from: each is a volume, which is made when one
of its layers is asked for, and removed when no snapshot is upon it.

    ROOT/images/HEX                     its mount point
    ROOT/images/HEX/layers/CHAIN_ID     its layers, read-only
    ROOT/images/HEX/snapshots/ID        what is made upon them

An image has a lock of its own, so none waits for another one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from btrfs_ublk import device as devices
from btrfs_ublk import image as images
from btrfs_ublk import volume as volumes
from btrfs_ublk.containers.kubelet_logins import KubeletLogins, Plugin
from btrfs_ublk.containers.store import (
    SNAPSHOT_REF,
    ImageRow,
    RefusedError,
    SnapshotStore,
)
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError
from btrfs_ublk.image.access import RegistryAccess, RegistryError
from btrfs_ublk.image.documents import SEALED_IN, InvalidImageError
from btrfs_ublk.image.policy import Policy, RefusedImageError, read_policy
from btrfs_ublk.image.reference import Reference, check_digest, parse_reference
from btrfs_ublk.units import GIB
from btrfs_ublk.volume.begin import bring_up
from btrfs_ublk.volume.forks import LAYERS_DIRECTORY

if TYPE_CHECKING:
    from btrfs_ublk.volume.store import VolumeDirectory

log = logging.getLogger(__name__)

#: Label that CRI adds: the reference that an image is pulled by.
IMAGE_REF = "containerd.io/snapshot/cri.image-ref"
#: The digest of its manifest, for this platform.
MANIFEST_DIGEST = "containerd.io/snapshot/cri.manifest-digest"
#: How BuildKit begins the name of a layer's snapshot (snapshot/snapshotid.go); the
#: algorithm and the digits of the chain ID follow.
_BUILDKIT_LAYER = "buildkit-layer-snapshot-v1-"
SNAPSHOTS_DIRECTORY = "snapshots"
DEFAULT_WRITABLE_BYTES = 64 * GIB
_HEX_DIGITS = 16  # of a digest, in names
#: containerd asks once for each layer: those of an image that cannot be opened shall
#: not wait one after the other.
_RETRY_S = 30.0
#: What is still mounted elsewhere is removed so much later, tried again and again.
_AGAIN_S = 30.0
#: How long a removal that has begun may take while the snapshotter ends.
_LAST_S = 10.0
#: Images that come up at once at the start.
_STARTING = 8
_ASKING = 16  # servers that are asked at once


@dataclass(frozen=True, kw_only=True)
class LazyOptions:
    """How sealed images are opened. ``plugins`` are the kubelet's, which are asked for
    logins. ``repositories`` are REGISTRY/REPOSITORY to ask for an image when containerd
    does not say where it is. ``indexes``: look for an index of an image that has no
    sealed one, at its registry. ``require``: refuse to unpack images that are "sealed",
    or "all". The rest is for the volumes' definitions."""

    access: RegistryAccess = field(default_factory=RegistryAccess)
    plugins: Sequence[Plugin] = ()
    repositories: Sequence[str] = ()
    indexes: bool = False
    require: Literal["sealed", "all"] | None = None
    writable_bytes: int = DEFAULT_WRITABLE_BYTES
    cache_max_bytes: int | None = None
    complete: int | Literal["idle"] | None = None


@dataclass(frozen=True, kw_only=True)
class SealedStatus:
    """A sealed image at one moment. ``fetched_bytes`` of ``data_bytes`` are on this
    machine. ``problem`` says why it is not up, ``failed_reads`` counts since its server
    started; None: its server did not answer."""

    digest: str
    name: str
    volume: str
    snapshots: int
    is_up: bool
    ready_s: float | None
    data_bytes: int | None = None
    fetched_bytes: int | None = None
    failed_reads: int | None = None
    problem: str | None = None


class _WrongLayerError(BtrfsUblkError):
    """An artifact does not have the layer that was asked for."""


class _NoPlaceError(BtrfsUblkError):
    """Nothing says which registry has an image."""


@dataclass(frozen=True)
class _Layer:
    """A layer that is asked for: its chain ID, and whether it is upon no other one."""

    chain_id: str
    is_first: bool

    def check(self, name: str, layers: Sequence[str]) -> None:
        """Refuse content of an image of that name, which has those layers, under a name
        that it has not."""
        if self.chain_id not in layers:
            raise _WrongLayerError(
                f"{name} has no layer of the chain ID {self.chain_id}",
                hint="it is no artifact of the image that names it: build and push it "
                "anew",
            )
        if self.is_first != (self.chain_id == layers[0]):
            raise _WrongLayerError(
                f"layer {self.chain_id} of {name} is "
                + ("upon others, and not alone" if self.is_first else "upon no other")
            )


class Images:
    """The images of a snapshotter. ``settle`` is called with the digest and the mount
    point of each that has come up, to bring its directories and rows into line."""

    def __init__(
        self,
        root: Path,
        store: SnapshotStore,
        options: LazyOptions,
        settle: Callable[[str, Path], None],
    ) -> None:
        self._mounts = root / "images"
        self._store = store
        self._options = options
        self._settle = settle
        self._lock = threading.Lock()  # of the fields below; never held for long
        self._locks: dict[str, threading.Lock] = {}
        self._up: dict[str, Sequence[str]] = {}  # the layers of those that are up
        self._failed: dict[str, tuple[float, Exception]] = {}
        #: By reference: when its index was looked for, and its digest, if there is one.
        self._looked_up: dict[str, tuple[float, str | Exception | None]] = {}
        self._problems: dict[str, str] = {}
        self._leaving: dict[str, threading.Thread] = {}  # which try to remove them
        self.fallbacks = Counter[str]()
        self._logins = KubeletLogins(root / "logins", options.plugins, options.access)
        self._pool = ThreadPoolExecutor(_STARTING, thread_name_prefix="images")
        self._ended = threading.Event()
        self._logins.retain(parse_reference(x.name) for x in store.images())

    def start(self) -> None:
        """Bring all images up that there were before, in the background, and remove
        those that a killed process has left without snapshots. Two thirds of all
        modules are for that and for the first pull, and are loaded only now, when
        containerd is answered.
        """
        self._pool.submit(_load)
        self._pool.submit(self._remove_halves)
        for image in self._store.images():
            self._pool.submit(self._restart, image.digest)

    def _remove_halves(self) -> None:
        """Remove what a killed process has left of volumes and their devices, which
        nobody else does if no other image comes up."""
        try:
            volumes.remove_halves(volumes.volumes_directory())
            devices.collect_half_made()
        except Exception as error:  # nobody else reports it
            log.warning("what a killed process has left stays: %s", str(error))

    def _restart(self, digest: str) -> None:
        try:
            if not self._remove_now_or_later(digest):
                self.mount_of(digest)
        except Exception as error:  # nobody else reports it
            log.warning("image %s does not come up: %s", digest, str(error))

    def close(self) -> None:
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            leaving = list(self._leaving.values())
        for thread in leaving:
            thread.join(_LAST_S)
        self._logins.close()

    def _lock_of(self, digest: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(digest, threading.Lock())

    def _mount(self, digest: str) -> Path:
        return self._mounts / _hex(digest)

    def add_layer(self, key: str, parent: str, labels: Mapping[str, str]) -> bool:
        """Make a committed snapshot of the lazy layer that labels ask for. False: the
        client unpacks the layer, as it is in no sealed image, or that cannot be opened.
        Raises RefusedError."""
        target, digest = labels.get(SNAPSHOT_REF), labels.get(SEALED_IN)
        if not target:
            return False
        if not digest and self._store.find_layer(target, parent) is None:
            try:
                digest = self._index_of(labels)
            except (BtrfsUblkError, OSError) as error:
                what = labels[MANIFEST_DIGEST]
                self._fall_back(what, target, labels, error.with_traceback(None))
                return False
        if not digest:
            if self._options.require == "all":
                raise RefusedError(
                    "FAILED_PRECONDITION",
                    f"layer {target} of {labels.get(IMAGE_REF, 'an image')} is in no "
                    "sealed image, and --require-lazy=all lets none be unpacked",
                )
            return False
        if self._store.find_layer(target, parent) is not None:
            return True
        try:
            check_digest(digest)
            layer = _Layer(chain_id := _chain_id(target), is_first=not parent)
            with self._lock_of(digest):
                self._refuse_if_failed(digest)
                self._refuse_if_failed(layer_of_it := f"{digest} {chain_id}")
                try:
                    name = self._open(digest, labels.get(IMAGE_REF), layer)
                except _WrongLayerError as error:
                    # The image itself may be asked for meanwhile.
                    self._failed[layer_of_it] = time.monotonic(), error
                    raise
                except (BtrfsUblkError, OSError) as error:
                    self._failed[digest] = time.monotonic(), error
                    raise
                self._store.add_layer(key, parent, labels, image=digest, layer=chain_id)
        except RefusedError:
            raise
        except (BtrfsUblkError, OSError) as error:
            # NB: it may be kept, and what its frames hold is of this call.
            self._fall_back(digest, target, labels, error.with_traceback(None))
            return False
        log.info("layer %s arrives when it is read, from %s", target, name)
        return True

    def _index_of(self, labels: Mapping[str, str]) -> str | None:
        """Return the digest of the index of an image that is not sealed, if there is
        one. Its registry is asked once for all layers of an image, and only if the
        policy names it. Raises BtrfsUblkError."""
        name, manifest = labels.get(IMAGE_REF), labels.get(MANIFEST_DIGEST)
        if not self._options.indexes or not name or not manifest:
            return None
        wanted = parse_reference(name).at(check_digest(manifest))
        if not any(rule.matches(wanted) for rule in read_policy().rules):
            return None
        key = str(wanted)
        with self._lock_of(key):
            past_s = time.monotonic() - _RETRY_S
            with self._lock:
                for one, what in list(self._looked_up.items()):
                    if what[0] <= past_s:
                        del self._looked_up[one]
                known = self._looked_up.get(key)
            found = known[1] if known else self._look_up_index(wanted)
            if known is None:
                with self._lock:
                    self._looked_up[key] = time.monotonic(), found
        if isinstance(found, Exception):
            raise found
        return found

    def _look_up_index(self, wanted: Reference) -> str | Exception | None:
        # What asks registries is a quarter of what a start would load.
        from btrfs_ublk.image.pull import NotSealedError, look_up
        from btrfs_ublk.image.transfer import open_repository

        try:
            with open_repository(wanted, self._logins.access(wanted)) as repository:
                _, _, sealed = look_up(wanted, repository)
        except NotSealedError:
            return None
        except (BtrfsUblkError, OSError) as error:
            return error.with_traceback(None)
        return sealed.digest

    def _refuse_if_failed(self, digest: str) -> None:
        when_s, error = self._failed.pop(digest, (0.0, None))
        if error is not None and time.monotonic() - when_s < _RETRY_S:
            self._failed[digest] = when_s, error
            raise error

    def _fall_back(
        self, digest: str, target: str, labels: Mapping[str, str], error: Exception
    ) -> None:
        reason = _reason(error)
        with self._lock:
            self.fallbacks[reason] += 1
        name = labels.get(IMAGE_REF, f"image {digest}")
        if self._options.require is not None:
            raise RefusedError(
                "FAILED_PRECONDITION",
                f"{name} is not unpacked (--require-lazy), and cannot be opened "
                f"({reason}): {error}",
            )
        log.warning(
            "%s: layer %s is unpacked, and does not arrive when it is read (%s): %s",
            name,
            target,
            reason,
            str(error),
        )

    def _open(self, digest: str, reference: str | None, layer: _Layer) -> str:
        """Bring an image up that has a layer; its metadata are fetched when it is new.
        Returns its name. The caller has its lock."""
        row = self._row(digest)
        volume = _volume(digest)
        if not _is_made(volume):
            if row is not None:
                self._forget(digest)
            return self._open_new(
                digest, parse_reference(reference) if reference else None, layer
            )
        if row is None:
            raise BtrfsUblkError(
                f"there is a volume {volume.name!r}, which this snapshotter has not "
                "made",
                hint=f"if nobody needs it: btrfs-ublk volume remove {volume.name}",
            )
        layer.check(row.name, self._up.get(digest) or _layers(volume))
        self._bring_up(digest, row.name)
        return row.name

    def _row(self, digest: str) -> ImageRow | None:
        rows = self._store.images()
        return next((row for row in rows if row.digest == digest), None)

    def _forget(self, digest: str) -> None:
        """Forget an image whose volume has gone, and what stood on it. Raises
        BtrfsUblkError when no volume is there, as on a disk that is not mounted yet."""
        self._up.pop(digest, None)
        volumes = _volume(digest).path.parent
        if not volumes.is_dir():
            raise BtrfsUblkError(
                f"the directory of volumes, {volumes}, is missing",
                hint="is its disk mounted? it has the snapshots of sealed images",
            )
        lost = {one.id for one in self._store.find() if one.image == digest}
        for one in self._store.forget_lost(lost):
            log.warning("snapshot %r is lost: the volume of its image is", one.name)
        row = self._row(digest)
        self._store.forget_image(digest)
        if row is not None:
            self._forget_login(row.name)

    def _open_new(self, digest: str, reference: Reference | None, layer: _Layer) -> str:
        """Bring an image up that is not here, or only its metadata are."""
        stored = images.ImageStore().find(digest)
        names = list(stored.names) if stored else []
        places = [reference.place] if reference else []
        places += [parse_reference(name).place for name in names]
        places += self._options.repositories
        if not places:
            raise _NoPlaceError(
                f"nothing says which registry has {digest}",
                hint="let CRI tell references (disable_snapshot_annotations = false), "
                "or name repositories with --repository",
            )
        if stored:  # before all of it is made
            of_it = [one.chain_id for one in images.ImageStore().header(digest).layers]
            layer.check(digest, of_it)
        # What pods name, root has not chosen: a digest does not suffice.
        policy = replace(read_policy(), digests=False) if stored is None else None
        from btrfs_ublk.image.pack import InvalidPackError
        from btrfs_ublk.image.pull import NotSealedError

        elsewhere = (RegistryError, InvalidImageError, RefusedImageError)
        first: BtrfsUblkError | None = None
        for place in dict.fromkeys(places):
            name = str(parse_reference(f"{place}@{digest}"))
            listed_in = reference if reference and reference.place == place else None
            try:
                self._bring_up(digest, name, layer, policy, listed_in)
            except (*elsewhere, InvalidPackError, NotSealedError) as error:
                first = first or error
                continue
            return name
        assert first is not None
        raise first

    def _bring_up(
        self,
        digest: str,
        name: str,
        layer: _Layer | None = None,
        policy: Policy | None = None,
        listed_in: Reference | None = None,
    ) -> Path:
        """Bring the volume of an image up. One that is not there is made, if the policy
        lets the image in, and the image has the layer. The caller has its lock."""
        mount = self._mount(digest)
        if digest in self._up and os.path.ismount(mount):
            return mount
        self._up.pop(digest, None)
        start_s = time.monotonic()
        volume = _volume(digest)
        is_new = not _is_made(volume)
        if is_new:
            # Its login is kept for that.
            self._store.add_image(digest, name)
        try:
            if is_new:
                definition = self._definition(name, mount)
            else:
                definition = replace(
                    volume.definition(),
                    mount=mount.absolute(),
                    cache_max_bytes=self._options.cache_max_bytes,
                )
                # It is renewed from now on; an image needs no network to come up.
                self._logins.access(parse_reference(name), fresh=False)
            self._mounts.mkdir(mode=0o700, exist_ok=True)

            def check() -> None:
                if layer is not None:
                    layer.check(name, _layers(volume))

            bring_up(
                volume.name, definition, made=check, policy=policy, listed_in=listed_in
            )
        except BaseException as error:
            self._problems[digest] = str(error)
            if is_new and not os.path.lexists(volume.path):
                self._store.forget_image(digest)
                self._forget_login(name)
                del self._problems[digest]
            raise
        (mount / SNAPSHOTS_DIRECTORY).mkdir(mode=0o700, exist_ok=True)
        self._settle(digest, mount)
        self._up[digest] = _layers(volume)
        self._problems.pop(digest, None)
        if is_new:
            self._store.set_ready(digest, time.monotonic() - start_s)
        return mount

    def _definition(self, name: str, mount: Path) -> volumes.VolumeDefinition:
        access = self._logins.access(parse_reference(name))
        return volumes.VolumeDefinition(
            image=name,
            image_docker_config=access.docker_config,
            image_ca_file=access.ca_file,
            image_insecure=access.insecure,
            mount=mount.absolute(),
            writable_bytes=self._options.writable_bytes,
            cache_max_bytes=self._options.cache_max_bytes,
            complete=self._options.complete,
        )

    def mount_of(self, digest: str) -> Path:
        """Return where an image is mounted for its snapshots; it is brought up if it is
        not. Needs no network. Raises BtrfsUblkError."""
        mount = self._mount(digest)
        if digest in self._up and os.path.ismount(mount):
            return mount
        with self._lock_of(digest):
            row, volume = self._row(digest), _volume(digest)
            if row is None or not _is_made(volume):
                self._forget(digest)
                raise BtrfsUblkError(f"the volume of image {digest} is lost")
            return self._bring_up(digest, row.name)

    def opened(self) -> list[tuple[str, Path]]:
        """Return the images that are up, with their mount points."""
        return [(digest, self._mount(digest)) for digest in list(self._up)]

    def cleanup(self) -> None:
        """Remove the images that no snapshot needs any more. One that is being
        opened stays, and one that is still mounted elsewhere until it is not."""
        for image in self._store.images(unused=True):
            try:
                self._remove_now_or_later(image.digest)
            except BtrfsUblkError as error:
                log.warning("%s", str(error))

    def _remove_now_or_later(self, digest: str) -> bool:
        try:
            return self._remove_unused(digest)
        except LeftoverError as error:
            log.warning("%s", str(error))
            self._remove_later(digest)
            return True

    def _remove_later(self, digest: str) -> None:
        with self._lock:
            if digest in self._leaving:
                return
            thread = threading.Thread(target=self._leave, args=[digest], daemon=True)
            self._leaving[digest] = thread
            thread.start()

    def _leave(self, digest: str) -> None:
        while not self._ended.wait(_AGAIN_S):
            try:
                self._remove_unused(digest)
                if not self._is_unused(digest):  # else somebody has its lock
                    break
            except LeftoverError:
                continue  # it has been said
            except Exception as error:  # nobody else reports it
                log.warning("%s", str(error))
                break
        with self._lock:
            self._leaving.pop(digest, None)

    def _remove_unused(self, digest: str) -> bool:
        """Remove an image that no snapshot needs, unless it is being opened. Returns
        whether none needs it. Raises BtrfsUblkError."""
        if not self._is_unused(digest):
            return False
        lock = self._lock_of(digest)
        if not lock.acquire(blocking=False):
            return True
        try:
            if self._is_unused(digest):
                self._up.pop(digest, None)
                volume = _volume(digest)
                if os.path.lexists(volume.path):
                    volumes.down_volume(volume.name)
                    volumes.remove_volume(volume.name)
                name = f"@{digest}"
                images.ImageStore().discard(digest, lambda one: one.endswith(name))
                row = self._row(digest)
                self._store.forget_image(digest)
                self._problems.pop(digest, None)
                if row is not None:
                    self._forget_login(row.name)
                with suppress(OSError):
                    self._mount(digest).rmdir()
        finally:
            lock.release()
        return True

    def _forget_login(self, name: str) -> None:
        """Forget the login of an image that is not here, if no other one needs it."""
        place = parse_reference(name).place
        others = (parse_reference(one.name).place for one in self._store.images())
        with self._lock:
            if place not in others:
                self._logins.forget(parse_reference(name))

    def _is_unused(self, digest: str) -> bool:
        return any(one.digest == digest for one in self._store.images(unused=True))

    def status(self) -> list[dict[str, Any]]:
        """Return the SealedStatus of each image, as a dictionary. Takes as long as the
        slowest server, at most about 5 s."""
        used = Counter(one.image for one in self._store.find())
        rows = self._store.images()
        if not rows:
            return []
        with ThreadPoolExecutor(min(_ASKING, len(rows))) as pool:
            found = pool.map(lambda row: self._look_at(row, used[row.digest]), rows)
            return [asdict(one) for one in found]

    def _look_at(self, row: ImageRow, snapshots: int) -> SealedStatus:
        volume = _volume(row.digest)
        found = SealedStatus(
            digest=row.digest,
            name=row.name,
            volume=volume.name,
            snapshots=snapshots,
            is_up=row.digest in self._up and os.path.ismount(self._mount(row.digest)),
            ready_s=row.ready_s,
            problem=self._problems.get(row.digest),
        )
        from btrfs_ublk.server import ServerStats

        with suppress(BtrfsUblkError, OSError):
            found = replace(found, data_bytes=_data_bytes(volume))
            stats = ServerStats.parse(devices.show_device(volume.name).stats or {})
            fetched = [int((lazy.cache or {}).get("bytes", 0)) for lazy in stats.lazy]
            errors = stats.kinds["lazy"].errors if "lazy" in stats.kinds else 0
            found = replace(found, fetched_bytes=sum(fetched), failed_reads=errors)
        return found


def layer_path(mount: Path, chain_id: str) -> Path:
    return mount / LAYERS_DIRECTORY / chain_id


def cached_bytes(digest: str) -> int:
    """Return what the cache of an image takes on the disk: no server is asked, as this
    may not wait for one. 0 where it is not there (any more)."""
    volume = _volume(digest)
    total = 0
    with suppress(BtrfsUblkError, OSError):
        cache = volume.cache_of(volume.definition())
        with os.scandir(cache) as files:
            for file in files:
                with suppress(FileNotFoundError):  # it has been evicted meanwhile
                    total += file.stat().st_blocks * 512
    return total


def _load() -> None:
    import btrfs_ublk.image.registry  # noqa: F401
    from btrfs_ublk.volume import image_seed, up  # noqa: F401

    image_seed.load_next()


def _hex(digest: str) -> str:
    return digest.partition(":")[2][:_HEX_DIGITS]


def _volume(digest: str) -> VolumeDirectory:
    return volumes.volume_directory(f"snapshotter-{_hex(digest)}")


def _is_made(volume: VolumeDirectory) -> bool:
    """Whether a volume is there: one that was killed before its metadata came is not,
    and up_volume() makes it anew."""
    return os.path.lexists(volume.path) and not volume.made().is_pending


def _layers(volume: VolumeDirectory) -> Sequence[str]:
    image = volume.made().image
    layers: Sequence[str] = image["layers"] if image else ()
    return layers


def _data_bytes(volume: VolumeDirectory) -> int:
    from btrfs_ublk.volume.image import data_bytes_of

    image = volume.made().image
    return data_bytes_of(image) if image else 0


def _chain_id(target: str) -> str:
    """Return what a snapshot that a client asks for has to be: containerd names it by
    its chain ID, and BuildKit by a form of it that is its own."""
    if target.startswith(_BUILDKIT_LAYER):
        return target.removeprefix(_BUILDKIT_LAYER).replace("-", ":", 1)
    return target


def _reason(error: Exception) -> str:
    """Return one of the reasons that fallbacks are counted by."""
    from btrfs_ublk.image.pack import InvalidPackError

    match error:
        case RefusedImageError():
            return "refused"
        case _WrongLayerError():
            return "chain-id"
        case _NoPlaceError():
            return "no-reference"
        case RegistryError(status=404):
            return "absent"
        case RegistryError():
            return "registry"
        case InvalidImageError() | InvalidPackError():
            return "invalid"
    return "failed"
