"""OCI image layouts: images as directories (OCI image specification, image-layout.md).

Names of files are digests, so a file that is there is complete: it gets its name last.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from btrfs_ublk.base.jsonfile import sync
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device.locks import Lock, lock_file
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.documents import (
    INDEX,
    MAX_DOCUMENT_BYTES,
    TAG,
    Descriptor,
    InvalidImageError,
    describe,
    describe_blob,
    descriptors,
    digest_of,
    parse_document,
    to_bytes,
)
from btrfs_ublk.image.reference import LayoutName, check_digest
from btrfs_ublk.kernel.new_file import new_file, write_new

INDEX_NAME = "index.json"
MARK = "oci-layout"
MARK_TEXT = '{"imageLayoutVersion": "1.0.0"}'
_COPY_BYTES = 1 << 20
_LOCK_TIMEOUT_S = 10.0
_SCRATCH = ".new-"


def blob_name(digest: str) -> str:
    """Return the name of a blob in a layout. Raises UsageError."""
    return f"blobs/{check_digest(digest).replace(':', '/')}"


class Layout:
    """An image layout at ``path``. The constructor reads nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index = path / INDEX_NAME
        self._made: list[Path] = []
        #: Blobs that may not be on disk: ours, or those of a command that was killed.
        self._unsynced: set[Path] = set()

    @classmethod
    def opened(cls, path: Path) -> Layout:
        """Return a layout that is there. Raises UsageError."""
        if not (path / MARK).is_file():
            raise UsageError(
                f"{path} is no OCI image layout: it has no file {MARK}",
                hint="make one: btrfs-ublk image build SOURCE -o DIRECTORY",
            )
        return cls(path)

    @classmethod
    def made(cls, path: Path) -> Layout:
        """Make an empty layout in a directory, which is made if missing, or return the
        one that is there. Raises UsageError when something else is there."""
        layout = cls(path)
        try:
            with deferred():
                layout._make()
            return layout
        except BaseException as error:
            layout.remove_if_empty()
            if isinstance(error, OSError):
                raise BtrfsUblkError(
                    f"cannot make an image layout in {path}: {error.strerror}"
                ) from error
            raise

    def _make(self) -> None:
        path, mark = self.path, self.path / MARK
        if not mark.is_file():
            if not path.exists():
                path.mkdir(parents=True, exist_ok=True)
                self._made.append(path)
            if any(path.iterdir()):
                raise UsageError(
                    f"{path} is not empty, and no OCI image layout",
                    hint="name an empty directory, or one that is not there",
                )
            # NB: first, so that what a killed command has made is a layout.
            write_new(mark, MARK_TEXT.encode())
            self._made.append(mark)
        for directory in (path / "blobs", path / "blobs/sha256"):
            if not directory.is_dir():
                directory.mkdir(exist_ok=True)
                self._made.append(directory)

    def remove_if_empty(self) -> None:
        """Undo what made() has made here, if nothing has been added since. Blobs that
        are there stay, as the next command that needs them does not fetch them again.
        So does a layout in which another command is at work."""
        with deferred(), suppress(OSError):  # of the first directory that is in use
            if self._made == [self.path]:
                self._made.pop().rmdir()
            lock = lock_file(self.path / MARK) if self._made else None
            if lock is None:
                return
            with lock:
                self._remove_made()

    def _remove_made(self) -> None:
        if not any((self.path / "blobs").glob(f"{_SCRATCH}*")):
            while self._made:
                path = self._made.pop()
                if path.name == MARK:
                    path.unlink()
                else:
                    path.rmdir()

    def _locked(self) -> Lock:
        lock = lock_file(self.path / MARK, timeout_s=_LOCK_TIMEOUT_S)
        if lock is None:
            raise BtrfsUblkError(
                f"another command writes to {self.path} for {_LOCK_TIMEOUT_S:g} s",
                hint=f"see which: fuser {self.path / MARK}",
            )
        return lock

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a new directory in the layout, for what is not complete yet; it is
        removed at the end. What killed commands left is removed first."""
        blobs = self.path / "blobs"
        new = blobs / f"{_SCRATCH}{os.urandom(8).hex()}"
        lock = None
        try:
            # A directory whose lock nobody holds is of a dead command.
            with deferred(), self._locked():
                for path in blobs.glob(f"{_SCRATCH}*"):
                    if (dead := lock_file(path / ".lock")) is not None:
                        with dead:
                            shutil.rmtree(path, ignore_errors=True)
                with _writing(self.path):
                    new.mkdir(mode=0o700)
                lock = lock_file(new / ".lock")
            yield new
        finally:
            with deferred():
                shutil.rmtree(new, ignore_errors=True)
                if lock is not None:
                    lock.close()

    def blob(self, digest: str) -> Path:
        """Return the path of a blob, which may not be there."""
        return self.path / blob_name(digest)

    def has(self, one: Descriptor) -> bool:
        """Whether the blob is there, in its length."""
        with suppress(OSError):
            return self.blob(one.digest).stat().st_size == one.size
        return False

    def check(self, one: Descriptor) -> Path:
        """Return the path of a blob that must be there. Raises InvalidImageError."""
        path = self.blob(one.digest)
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise InvalidImageError(
                f"{self.path} lacks blob {one.digest}: {error.strerror}",
                hint="copy the image again, with all its blobs",
            ) from error
        if size_bytes != one.size:
            raise InvalidImageError(
                f"{path} has {size_bytes} bytes, and its descriptor says {one.size}",
                hint="copy the image again",
            )
        return path

    def parts(self, one: Descriptor) -> Iterator[bytes]:
        """Yield what there is of a blob, unverified. Raises InvalidImageError."""
        path = self.blob(one.digest)
        try:
            with open(path, "rb") as file:
                while part := file.read(_COPY_BYTES):
                    yield part
        except OSError as error:
            raise InvalidImageError(
                f"cannot read {path}: {error.strerror}",
                hint="copy the image again, with all its blobs",
            ) from error

    def read(self, one: Descriptor) -> bytes:
        """Return a document or a small blob, verified. Raises InvalidImageError."""
        if one.size > MAX_DOCUMENT_BYTES:
            raise InvalidImageError(
                f"{one.digest} has {one.size} bytes, too many for a document"
            )
        path = self.check(one)
        data = path.read_bytes()
        if digest_of(data) != one.digest:
            raise _not_its_digest(path, digest_of(data))
        return data

    def verify(
        self, one: Descriptor, progress: Callable[[int], object] = lambda count: None
    ) -> Path:
        """Return the path of a blob whose content was verified."""
        path = self.check(one)
        found = hashlib.sha256()
        for part in self.parts(one):
            found.update(part)
            progress(len(part))
        digest = f"sha256:{found.hexdigest()}"
        if digest != one.digest:
            raise _not_its_digest(path, digest)
        return path

    def add(self, media_type: str, data: bytes, **more: Any) -> Descriptor:
        """Add a document or a small blob; ``more`` are keys of its descriptor."""
        one = describe(media_type, data, **more)
        if not self.has(one):
            with _writing(self.path):
                write_new(self.blob(one.digest), data, mode=0o644, replace=True)
        self._unsynced.add(self.blob(one.digest))
        return one

    @contextmanager
    def adding(self, media_type: str) -> Iterator[tuple[IO[bytes], list[Descriptor]]]:
        """Write a blob. The list has its descriptor after the block."""
        made: list[Descriptor] = []
        with self.scratch() as directory, _writing(self.path):
            path = directory / "blob"
            with open(path, "xb") as file:
                yield file, made
            made.append(self.take(path, media_type))

    def take(self, path: Path, media_type: str) -> Descriptor:
        """Add a file by moving it here, from the same file system."""
        found = hashlib.sha256()
        size_bytes = 0
        with _writing(self.path):
            with open(path, "rb") as file:
                while part := file.read(_COPY_BYTES):
                    found.update(part)
                    size_bytes += len(part)
            one = describe_blob(media_type, f"sha256:{found.hexdigest()}", size_bytes)
            path.chmod(0o644)
            path.rename(self.blob(one.digest))
        self._unsynced.add(self.blob(one.digest))
        return one

    def copy(self, one: Descriptor, other: Layout) -> None:
        """Copy a blob from another layout: its name only, where that is possible."""
        if not self.has(one):
            self._copy(one, other)
        self._unsynced.add(self.blob(one.digest))

    def _copy(self, one: Descriptor, other: Layout) -> None:
        source = other.verify(one)
        with _writing(self.path):
            try:
                os.link(source, self.blob(one.digest))
            except OSError:  # another file system, or one without hard links
                with (
                    open(source, "rb") as file,
                    new_file(self.blob(one.digest), mode=0o644, replace=True) as new,
                ):
                    shutil.copyfileobj(file, new, _COPY_BYTES)

    def images(self) -> list[Descriptor]:
        """Return what index.json lists. Raises InvalidImageError."""
        where = str(self._index)
        try:
            with open(self._index, "rb") as file:
                # One more is refused as too many.
                data = file.read(MAX_DOCUMENT_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BtrfsUblkError(f"{where}: {error.strerror}") from error
        return descriptors(parse_document(data, where), "manifests", where)

    def tagged(self, tag: str) -> Descriptor | None:
        """Return the image of that name. Raises InvalidImageError."""
        return next((x for x in self.images() if x.annotations.get(TAG) == tag), None)

    def tag(self, one: Descriptor | None, tag: str) -> None:
        """Name an image in index.json; another one of that name loses it. With None, no
        image has the name any more. All that was added is on disk before."""
        with self._locked(), _writing(self.path):
            blobs = self.path / "blobs"
            for path in (*self._unsynced, blobs / "sha256", blobs):
                sync(path)
            self._unsynced.clear()
            others = [x for x in self.images() if x.annotations.get(TAG) != tag]
            manifests = [dict(each.raw) for each in others]
            if one is not None:
                annotations = {**one.annotations, TAG: tag}
                manifests.append(dict(one.raw) | {"annotations": annotations})
            index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}
            write_new(
                self._index, to_bytes(index), mode=0o644, replace=True, synced=True
            )

    def find(self, tag: str | None) -> Descriptor:
        """Return the image of a tag, or the only one. Raises UsageError."""
        images = self.images()
        tags = [str(each.annotations.get(TAG, each.digest)) for each in images]
        found = [x for x, name in zip(images, tags) if tag in (None, name)]
        if len(found) == 1:
            return found[0]
        if not images:
            raise UsageError(f"layout {self.path} has no image")
        what = "more than one image" if tag is None else f"no image {tag!r}"
        raise UsageError(
            f"layout {self.path} has {what}",
            hint=f"name one, as in {LayoutName(self.path, tags[0])}; "
            f"there are: {', '.join(tags)}",
        )


def _not_its_digest(path: Path, digest: str) -> InvalidImageError:
    return InvalidImageError(
        f"{path} has the content {digest}: it was changed, or is damaged",
        hint="remove it, and copy the image again",
    )


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot write to image layout {path}: {error.strerror or error}",
            hint="is its disk full, or read-only?",
        ) from error
