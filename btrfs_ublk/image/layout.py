"""OCI image layouts: images as directories (OCI image specification, image-layout.md),
here, in an S3 bucket, or behind a web server. The files have the same names at all of
these places, so that any tool can copy a layout from one to another.

Names of files are digests, so a file that is there is complete: it gets its name last.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from btrfs_ublk.base.jsonfile import sync
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.device.locks import SCRATCH, Lock, lock_file, scratch_directory
from btrfs_ublk.errors import BtrfsUblkError, UsageError, writing
from btrfs_ublk.image.access import RegistryAccess, RegistryError
from btrfs_ublk.image.connection import Connection
from btrfs_ublk.image.documents import (
    INDEX,
    MANIFEST,
    MAX_DOCUMENT_BYTES,
    TAG,
    Descriptor,
    InvalidImageError,
    describe,
    describe_blob,
    digest_of,
    digest_of_file,
    is_index,
    parse_document,
    parse_index,
    retagged,
    tagged,
    write_index,
)
from btrfs_ublk.image.reference import LayoutName, Reference, check_digest, check_tag
from btrfs_ublk.image.repository import (
    Document,
    Progress,
    Repository,
    bounded,
    no_progress,
    read_rest,
)
from btrfs_ublk.kernel.new_file import new_file, write_new

if TYPE_CHECKING:
    from btrfs_ublk.image.s3 import S3Files

INDEX_NAME = "index.json"
MARK = "oci-layout"
MARK_TEXT = '{"imageLayoutVersion": "1.0.0"}'
_COPY_BYTES = 1 << 20
_LOCK_TIMEOUT_S = 10.0
#: How often a change of index.json in a store is tried while others change it.
_MAX_CHANGES = 20
_PAUSE_S = 0.2


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
            with deferred(), writing(f"make an image layout in {path}"):
                layout._make()
        except BaseException:
            layout.remove_if_empty()
            raise
        return layout

    def _make(self) -> None:
        mark = self.path / MARK
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(
                f"{self.path} is no directory",
                hint="name an empty directory, or one that is not there",
            )
        self._make_directory(self.path)
        if not mark.is_file():
            if any(self.path.iterdir()):
                raise UsageError(
                    f"{self.path} is not empty, and no OCI image layout",
                    hint="name an empty directory, or one that is not there",
                )
            # NB: first, so that what a killed command has made is a layout.
            write_new(mark, MARK_TEXT.encode())
            self._made.append(mark)
        self._make_directory(self.path / "blobs")
        self._make_directory(self.path / "blobs/sha256")

    def _make_directory(self, path: Path) -> None:
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            self._made.append(path)

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
                if not any((self.path / "blobs").glob(f"{SCRATCH}*")):
                    while self._made:
                        path = self._made.pop()
                        path.unlink() if path.name == MARK else path.rmdir()

    def _locked(self) -> Lock:
        lock = lock_file(self.path / MARK, timeout_s=_LOCK_TIMEOUT_S)
        if lock is None:
            raise BtrfsUblkError(
                f"another command writes to {self.path} for {_LOCK_TIMEOUT_S:g} s",
                hint=f"see which: fuser {self.path / MARK}",
            )
        return lock

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"write to image layout {self.path}")

    def scratch(self) -> AbstractContextManager[Path]:
        """Yield a new directory in the layout, for what is not complete yet; it is
        removed at the end. What killed commands left is removed first."""
        what = f"write to image layout {self.path}"
        return scratch_directory(self.path / "blobs", what, self._locked)

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
        with _reading(path), open(path, "rb") as file:
            while part := file.read(_COPY_BYTES):
                yield part

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

    def verify(self, one: Descriptor) -> Path:
        """Return the path of a blob whose content was verified."""
        path = self.check(one)
        with _reading(path):
            digest = digest_of_file(path)
        if digest != one.digest:
            raise _not_its_digest(path, digest)
        return path

    def get_file(self, one: Descriptor, _new: Path) -> Path:
        """As Repository.get_file(): what is here needs no new file."""
        return self.verify(one)

    def add(self, media_type: str, data: bytes, **more: Any) -> Descriptor:
        """Add a document or a small blob; ``more`` are keys of its descriptor."""
        one = describe(media_type, data, **more)
        if not self.has(one):
            with self._writing():
                write_new(self.blob(one.digest), data, mode=0o644, replace=True)
        self._unsynced.add(self.blob(one.digest))
        return one

    @contextmanager
    def adding(self, media_type: str) -> Iterator[tuple[IO[bytes], list[Descriptor]]]:
        """Write a blob. The list has its descriptor after the block."""
        made: list[Descriptor] = []
        with self.scratch() as directory, self._writing():
            path = directory / "blob"
            with open(path, "xb") as file:
                yield file, made
            made.append(self.take(path, media_type))

    def take(self, path: Path, media_type: str) -> Descriptor:
        """Add a file by moving it here, from the same file system."""
        with self._writing():
            size_bytes = path.stat().st_size
            one = describe_blob(media_type, digest_of_file(path), size_bytes)
            path.chmod(0o644)
            path.rename(self.blob(one.digest))
        self._unsynced.add(self.blob(one.digest))
        return one

    def copy(self, one: Descriptor, other: Layout) -> None:
        """Copy a blob from another layout: its name only, where that is possible."""
        target = self.blob(one.digest)
        self._unsynced.add(target)
        if self.has(one):
            return
        source = other.verify(one)
        with self._writing():
            try:
                os.link(source, target)
            except OSError:  # another file system, or one without hard links
                with (
                    open(source, "rb") as file,
                    new_file(target, mode=0o644, replace=True) as new,
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
        return parse_index(data, where)

    def tagged(self, tag: str) -> Descriptor | None:
        """Return the image of that name. Raises InvalidImageError."""
        return tagged(self.images(), tag)

    def tag(self, one: Descriptor | None, tag: str) -> None:
        """Name an image in index.json; another one of that name loses it. With None, no
        image has the name any more. All that was added is on disk before."""
        with self._locked(), self._writing():
            blobs = self.path / "blobs"
            for path in (*self._unsynced, blobs / "sha256", blobs):
                sync(path)
            self._unsynced.clear()
            index = retagged(self.images(), one, tag)
            write_new(self._index, index, mode=0o644, replace=True, synced=True)

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
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidImageError(
            f"cannot read {path}: {error.strerror}",
            hint="copy the image again, with all its blobs",
        ) from error


class _WebFiles:
    """Files of a web server that answers requests for ranges."""

    def __init__(self, reference: Reference, access: RegistryAccess) -> None:
        self.place = reference.place
        self._connection = Connection(
            reference.registry, reference.repository, access, base=f"{self.place}/"
        )

    def close(self) -> None:
        self._connection.close()

    def read(self, name: str) -> tuple[bytes, str | None] | None:
        with self._connection.request(
            "GET", name, what=f"get {name}", ok=(200, 404)
        ) as response:
            if response.status_code == 404:
                return None
            data = bounded(response, f"{self.place}/{name}")
            return data, response.headers.get("ETag")

    def has(self, name: str) -> bool:
        with self._connection.request(
            "HEAD", name, what=f"look for {name}", ok=(200, 404)
        ) as response:
            return response.status_code == 200

    def rest(self, name: str, one: Descriptor, done: int) -> Iterator[bytes]:
        return read_rest(self._connection, name, self.place, one, done)


class StoredLayout(Repository):
    """An image layout in a store. Tags are in its index.json, as in a directory."""

    def __init__(
        self, reference: Reference, access: RegistryAccess, *, writing: bool = False
    ) -> None:
        self.place = reference.place
        self._files: _WebFiles | S3Files
        self._bucket: S3Files | None = None
        if reference.is_in_bucket:
            from btrfs_ublk.image.s3 import S3Files

            self._files = self._bucket = S3Files(reference, access)
        else:
            self._files = _WebFiles(reference, access)
        if writing and not self._written().has(MARK):
            self._written().write(MARK, MARK_TEXT.encode())

    def _written(self) -> S3Files:
        if self._bucket is None:
            raise UsageError(
                f"{self.place} is a web server, which is only read",
                hint="build into the directory that it serves: btrfs-ublk image build "
                "-o DIRECTORY; or copy a layout there, index.json last",
            )
        return self._bucket

    def close(self) -> None:
        self._files.close()

    def _images(self) -> tuple[list[Descriptor], str | None]:
        """Return what index.json lists, and its version; None where there is none."""
        found = self._files.read(INDEX_NAME)
        if found is None:
            return [], None
        return parse_index(found[0], f"{self.place}/{INDEX_NAME}"), found[1]

    def document(self, version: str) -> Document:
        """As Repository.document()."""
        digest, media_type = version, None
        if not version.startswith("sha256:"):
            images, _ = self._images()
            one = tagged(images, version)
            if one is None:
                raise self._lacks(version, images)
            digest, media_type = one.digest, one.media_type
        found = self._files.read(blob_name(digest))
        if found is None:
            raise RegistryError(
                f"{self.place} has no manifest {digest}",
                hint="push the image again",
                status=404,
            )
        data, _ = found
        if digest_of(data) != digest:
            raise InvalidImageError(
                f"{self.place} has for {digest} the content {digest_of(data)}",
                hint="it was changed, or is damaged: push the image again",
            )
        parsed = parse_document(data, digest)
        kind = parsed.get("mediaType") or (INDEX if is_index(parsed) else MANIFEST)
        return Document(digest, media_type or str(kind), data)

    def _lacks(self, tag: str, images: list[Descriptor]) -> RegistryError:
        tags = self._tags(images)
        if not images and not self._files.has(MARK):
            return RegistryError(
                f"{self.place} is no OCI image layout: it has no file {MARK}",
                hint="push an image there: btrfs-ublk image push",
                status=404,
            )
        hint = f"there are: {', '.join(tags[:20])}" if tags else None
        return RegistryError(
            f"{self.place} has no image {tag!r}", hint=hint, status=404
        )

    @staticmethod
    def _tags(images: list[Descriptor]) -> list[str]:
        tags = []
        for one in images:
            with suppress(UsageError, TypeError):  # others write layouts, too
                tags.append(check_tag(one.annotations.get(TAG, "")))
        return tags

    def tags(self) -> list[str]:
        """Return the names of all images here."""
        return self._tags(self._images()[0])

    def has_document(self, version: str) -> bool:
        if version.startswith("sha256:"):
            return self._files.has(blob_name(version))
        return version in self.tags()

    def has(self, one: Descriptor) -> bool:
        return self._files.has(blob_name(one.digest))

    def put_document(self, version: str, media_type: str, data: bytes) -> bool:
        """As Repository.put_document(). A tag is put into index.json, beside what
        others put there meanwhile."""
        self._written().write(blob_name(digest_of(data)), data)
        if not version.startswith("sha256:"):
            one = describe(media_type, data)
            self._tag(check_tag(version), lambda images: one)
        return False

    def put_referrer(self, one: Descriptor, subject: str, data: bytes) -> None:
        """As Repository.put_referrer(), beside what others put there meanwhile."""
        self._written().write(blob_name(one.digest), data)
        tag = subject.replace(":", "-")

        def listed(images: list[Descriptor]) -> Descriptor:
            before = tagged(images, tag)
            found = []
            if before is not None:
                data = self.document(before.digest).data
                found = parse_index(data, before.digest)
            others = [x.raw for x in found if x.digest != one.digest]
            data = write_index([*others, one.raw])
            self._written().write(blob_name(digest_of(data)), data)
            return describe(INDEX, data)

        self._tag(tag, listed)

    def _tag(self, tag: str, make: Callable[[list[Descriptor]], Descriptor]) -> None:
        """Name what ``make`` makes of the images that are there."""
        for _ in range(_MAX_CHANGES):
            images, version = self._images()
            index = retagged(images, make(images), tag)
            if self._written().replace(INDEX_NAME, index, version):
                return
            time.sleep(random.uniform(0, _PAUSE_S))
        raise BtrfsUblkError(
            f"others change {self.place}/{INDEX_NAME} all the time",
            hint="push again: what was sent is there",
        )

    def upload(
        self, one: Descriptor, path: Path, progress: Progress = no_progress
    ) -> None:
        """As Repository.upload()."""
        self._written().upload(blob_name(one.digest), path, progress)

    def upload_bytes(self, one: Descriptor, data: bytes) -> None:
        self._written().write(blob_name(one.digest), data)

    def _rest(self, one: Descriptor, done: int) -> Iterator[bytes]:
        return self._files.rest(blob_name(one.digest), one, done)
