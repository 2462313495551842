"""Sealed images on this machine: /var/lib/btrfs-ublk/images.

sha256/HEX/ has manifest.json and pack of an image, by the digest of its manifest;
references.json says which name was pulled as which. A directory is there as a whole or
not at all. Root trusts what is in it, as it was verified when it came.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path
from typing import TYPE_CHECKING

from btrfs_ublk.base.jsonfile import RecordFormat, remove_unfinished, sync
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.private_dirs import check_private, make_private
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device.locks import (
    SCRATCH,
    lock_file,
    remove_dead,
    scratch_directory,
)
from btrfs_ublk.errors import BtrfsUblkError, UsageError, writing
from btrfs_ublk.image.documents import SealedManifest, parse_sealed_manifest
from btrfs_ublk.image.reference import check_digest
from btrfs_ublk.kernel.new_file import write_new

if TYPE_CHECKING:
    from btrfs_ublk.image.pack import PackHeader

#: Images are kept in the directory that the variable names, else in this one.
IMAGES_VARIABLE = "BTRFS_UBLK_IMAGES_DIR"
IMAGES_DIRECTORY = "/var/lib/btrfs-ublk/images"
FORMAT_VERSION = 1
_HINT = f"run as root, or name a directory of yours in {IMAGES_VARIABLE}"
#: Another command may be removing images, or be adding one; it fetches nothing.
_LOCK_TIMEOUT_S = 60.0


class DamagedStoreError(BtrfsUblkError):
    """A file of the store is not valid; it was left unchanged."""


_FILES = RecordFormat(
    FORMAT_VERSION,
    DamagedStoreError,
    lambda path: f"remove it: rm {path}; then pull the images again",
    synced=True,
)


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """A name in references.json: the manifest that it was pulled as, when (Unix time),
    and whether it keeps the image."""

    digest: str
    time_s: int
    pinned: bool = False


@dataclass(frozen=True, kw_only=True)
class StoredImage:
    """An image in the store. ``names`` are those that it was pulled by."""

    digest: str
    directory: Path
    names: tuple[str, ...]
    pinned: bool
    pack_bytes: int
    data_bytes: int

    @property
    def pack(self) -> Path:
        return self.directory / "pack"

    @property
    def manifest(self) -> Path:
        return self.directory / "manifest.json"


class ImageStore:
    """The store in ``base`` (None: what BTRFS_UBLK_IMAGES_DIR names, or the default).
    The constructor touches nothing."""

    def __init__(self, base: StrPath | None = None) -> None:
        found = base or os.environ.get(IMAGES_VARIABLE) or IMAGES_DIRECTORY
        self.path = Path(os.path.abspath(found))
        self._references = self.path / "references.json"
        self._digests = self.path / "sha256"

    def _directory(self, digest: str) -> Path:
        return self._digests / check_digest(digest).partition(":")[2]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        for path in (self.path, self._digests):
            make_private(path, what="directory of images", hint=_HINT)
        lock = lock_file(self.path / ".lock", timeout_s=_LOCK_TIMEOUT_S)
        if lock is None:
            raise BtrfsUblkError(
                f"another command works on {self.path} for {_LOCK_TIMEOUT_S:g} s",
                hint=f"see which: fuser {self.path / '.lock'}",
            )
        with lock:
            remove_unfinished(self._references)
            yield

    def adding(self) -> AbstractContextManager[Path]:
        """Yield a new directory in the store, for a pack that is on its way; it is
        removed at the end if it is still there. What dead commands left goes first."""
        return scratch_directory(self.path, f"write to {self.path}", self._locked)

    def add(
        self, new: Path, manifest: bytes, trace: Sequence[tuple[int, int]] = ()
    ) -> str:
        """Add an image, whose verified ``pack`` is in ``new`` (from adding()); return
        its digest. ``trace`` has the extents of its data that a start reads."""
        sealed = parse_sealed_manifest(manifest, "the manifest")
        target = self._directory(sealed.digest)
        with self._locked():
            if target.exists():
                return sealed.digest
            with writing(f"write to {new}"):
                write_new(new / "manifest.json", manifest, mode=0o600)
                if trace:
                    text = json.dumps(trace).encode()
                    write_new(new / "trace.json", text, mode=0o600, synced=True)
                (new / ".lock").unlink(missing_ok=True)
                for path in (new / "pack", new / "manifest.json", new):
                    sync(path)
                new.rename(target)
                sync(self._digests)
        return sealed.digest

    def name(self, name: str, digest: str, *, pinned: bool = False) -> None:
        """Record that an image was pulled by a name, which another one loses."""
        with self._locked():
            names = self._names()
            before = names.get(name)
            keeps = pinned or (before is not None and before.pinned)
            names[name] = Pulled(digest=digest, time_s=int(time.time()), pinned=keeps)
            self._write(names)

    def pin(self, name: str, *, pinned: bool) -> None:
        """Keep an image, or do not keep it any more. Raises UsageError."""
        with self._locked():
            names = self._names()
            if name not in names:
                raise UsageError(
                    f"no image was pulled as {name!r}",
                    hint="see: btrfs-ublk image list",
                )
            names[name] = replace(names[name], pinned=pinned)
            self._write(names)

    def pulled_s(self, name: str) -> int | None:
        """Return when an image was pulled by a name (Unix time)."""
        found = self._names().get(name)
        return None if found is None else found.time_s

    def _names(self) -> dict[str, Pulled]:
        keys = _FILES.read(self._references) or {"references": {}}
        found = keys.get("references")
        if not isinstance(found, dict):
            raise _FILES.damaged(self._references, "it has no references")
        return {
            name: _FILES.parse(Pulled, one, self._references)
            for name, one in found.items()
        }

    def _write(self, names: dict[str, Pulled]) -> None:
        keys = {name: asdict(names[name]) for name in sorted(names)}
        _FILES.write(self._references, {"references": keys})

    def find(self, name: str) -> StoredImage | None:
        """Return the image that was pulled by a name, or that has a digest; None when
        there is none."""
        if not self._exists():
            return None
        names = self._names()
        digest = names[name].digest if name in names else name.rpartition("@")[2]
        return next((x for x in self._stored(names) if x.digest == digest), None)

    @contextmanager
    def holding(self, name: str) -> Iterator[StoredImage | None]:
        """Yield what find() returns; collect() leaves it during the block."""
        found = self.find(name)
        with ExitStack() as stack:
            if found is not None:
                with suppress(FileNotFoundError):
                    file = stack.enter_context(open(found.manifest, "rb"))
                    flock(file, LOCK_SH)
                if not found.pack.exists():
                    found = None  # It was collected at that moment.
            yield found

    def images(self) -> list[StoredImage]:
        """Return all images, by name."""
        if not self._exists():
            return []
        found = list(self._stored(self._names()))
        return sorted(found, key=lambda x: (x.names or ("~",), x.digest))

    def _exists(self) -> bool:
        # NB: Path.exists() raises where this user may not look.
        what = "directory of images"
        check_private(self.path, what=what, hint=_HINT, missing_ok=True)
        return self.path.exists()

    def _stored(self, names: dict[str, Pulled]) -> Iterator[StoredImage]:
        for directory in self._digests.glob("[0-9a-f]*"):
            digest = f"sha256:{directory.name}"
            mine = {name: x for name, x in names.items() if x.digest == digest}
            try:
                manifest = self.manifest(digest)
            except FileNotFoundError:
                continue  # another command has removed it
            yield StoredImage(
                digest=digest,
                directory=directory,
                names=tuple(sorted(mine)),
                pinned=any(x.pinned for x in mine.values()),
                pack_bytes=manifest.pack.size,
                data_bytes=(
                    self.header(digest).data_bytes
                    if manifest.subject
                    else manifest.data_bytes
                ),
            )

    def manifest(self, digest: str) -> SealedManifest:
        """Return the manifest of an image that is there."""
        path = self._directory(digest) / "manifest.json"
        return parse_sealed_manifest(path.read_bytes(), str(path))

    def trace(self, digest: str) -> list[list[int]]:
        """Return the extents of an image's data that were traced: none, as a rule."""
        with suppress(FileNotFoundError):
            found: list[list[int]] = json.loads(
                (self._directory(digest) / "trace.json").read_bytes()
            )
            return found
        return []

    def header(self, digest: str) -> PackHeader:
        from btrfs_ublk.image.pack import read_header

        return read_header(self._directory(digest) / "pack")

    def collect(
        self,
        used: Collection[str],
        *,
        dry_run: bool = False,
    ) -> list[StoredImage]:
        """Remove the images whose digest is not in ``used``, that no pinned name has
        and that no command is taking, and what dead commands left. Returns those that
        were, or would be, removed."""
        if not self._exists():
            return []
        with self._locked():
            names = self._names()
            gone = [
                x for x in self._stored(names) if x.digest not in used and not x.pinned
            ]
            if dry_run:
                return gone
            for image in list(gone):
                with deferred(), open(image.manifest, "rb") as file:
                    try:
                        flock(file, LOCK_EX | LOCK_NB)
                    except BlockingIOError:  # holding() has it
                        gone.remove(image)
                        continue
                    # The rename makes it vanish as a whole, if this is interrupted.
                    dead = self.path / f"{SCRATCH}{os.urandom(8).hex()}"
                    image.directory.rename(dead)
                    shutil.rmtree(dead, ignore_errors=True)
            # NB: a command may have been killed when it had removed other images.
            there = {f"sha256:{path.name}" for path in self._digests.iterdir()}
            kept = {name: x for name, x in names.items() if x.digest in there}
            if kept != names:
                self._write(kept)
            remove_dead(self.path)
        return gone

    def discard(self, digest: str, is_ours: Callable[[str], bool]) -> None:
        """Remove an image, unless it is pinned, or has a name that is not ours."""
        found = self.find(digest)
        if found is not None and all(map(is_ours, found.names)):
            self.collect({x.digest for x in self.images()} - {digest})
