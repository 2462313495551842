"""What holds images, and is asked for them by tag or digest: a repository of a
registry, or an image layout in an S3 bucket or behind a web server.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

from btrfs_ublk.base.log import log
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.image.access import RegistryError
from btrfs_ublk.image.connection import Connection, deadline
from btrfs_ublk.image.documents import (
    INDEX,
    MAX_DOCUMENT_BYTES,
    Descriptor,
    InvalidImageError,
    digest_of,
    parse_index,
    write_index,
)
from btrfs_ublk.image.transport import Answer, NoAnswer

COPY_BYTES = 256 << 10
#: Without any progress between them.
MAX_BREAKS = 5

Progress = Callable[[int], object]


def no_progress(_count: int) -> None:
    pass


@dataclass(frozen=True)
class Document:
    """An index or a manifest, as it is in the repository, verified."""

    digest: str
    media_type: str
    data: bytes


class Repository(ABC):
    """Images of one place, to read, or to write as well. ``place`` is its name."""

    place: str

    def close(self) -> None:
        """End all connections."""

    def __enter__(self) -> Repository:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def document(self, version: str) -> Document:
        """Return the index or manifest of a tag or digest. Raises RegistryError, with
        the status 404 where there is none, and InvalidImageError for what has another
        digest."""

    @abstractmethod
    def has_document(self, version: str) -> bool: ...

    @abstractmethod
    def has(self, one: Descriptor) -> bool:
        """Whether a blob is there."""

    @abstractmethod
    def put_document(self, version: str, media_type: str, data: bytes) -> bool:
        """Store an index or a manifest; all that it names must be there. Returns
        whether it is listed among those that refer to its subject."""

    @abstractmethod
    def upload(
        self, one: Descriptor, path: Path, progress: Progress = no_progress
    ) -> None:
        """Store a blob from a file, in pieces. Raises RegistryError, OSError."""

    @abstractmethod
    def upload_bytes(self, one: Descriptor, data: bytes) -> None:
        """Store a small blob."""

    @abstractmethod
    def _rest(self, one: Descriptor, done: int) -> Iterator[bytes]:
        """Yield a blob from byte ``done`` on, unverified. Raises
        NoAnswer when that breaks."""

    def mount(self, digest: str, repository: str) -> bool:
        """Take a blob over from another repository of the registry. Returns False when
        that is not possible, which says nothing about why."""
        return False

    def referrers(self, digest: str) -> list[Descriptor]:
        """Return what refers to a manifest. Raises RegistryError, InvalidImageError."""
        return self._referrers_by_tag(digest)

    def _referrers_by_tag(self, digest: str) -> list[Descriptor]:
        tag = digest.replace(":", "-")
        try:
            found = self.document(tag)
        except RegistryError as error:
            if error.status == 404:
                return []
            raise
        # GitLab takes the tag for the digest, and has the subject itself there.
        if found.media_type != INDEX or found.digest == digest:
            return []
        return parse_index(found.data, f"{self.place}:{tag}")

    def put_referrer(self, one: Descriptor, subject: str, data: bytes) -> None:
        """Store a manifest that refers to another one, so that referrers() has it as
        the last."""
        if self.put_document(one.digest, one.media_type, data):
            return
        # NB: two that do this at once may lose one; the specification has no lock.
        others = [x for x in self._referrers_by_tag(subject) if x.digest != one.digest]
        index = write_index(each.raw for each in (*others, one))
        self.put_document(subject.replace(":", "-"), INDEX, index)

    def read(self, one: Descriptor) -> bytes:
        """Return a document or a small blob, verified."""
        return self.document(one.digest).data if one.is_document else self.get_blob(one)

    def get_blob(self, one: Descriptor) -> bytes:
        """Return a small blob, verified."""
        if one.size > MAX_DOCUMENT_BYTES:
            raise InvalidImageError(
                f"blob {one.digest} of {self.place} has {one.size} bytes, too many"
            )
        data = b"".join(self.parts(one))
        if digest_of(data) != one.digest:
            raise self._is_another(one, digest_of(data))
        return data

    def download(
        self, one: Descriptor, path: Path, progress: Progress = no_progress
    ) -> None:
        """Get a blob into the file ``path``, which may hold its beginning from a
        download that broke. Raises RegistryError, InvalidImageError, OSError.

        When the content is another one, the file is removed. Caches are asked first,
        and nothing that one says is a failure.
        """
        if self._download_by_cache(one, path):
            progress(one.size)
            return
        found = hashlib.sha256()
        with open(path, "ab+") as file:
            if file.tell() > one.size:
                file.truncate(0)
            file.seek(0)
            while part := file.read(COPY_BYTES):
                found.update(part)
            progress(file.tell())
            for part in self.parts(one, file.tell()):
                file.write(part)
                found.update(part)
                progress(len(part))
            file.flush()
            os.fsync(file.fileno())
        digest = f"sha256:{found.hexdigest()}"
        if digest != one.digest:
            path.unlink()
            raise self._is_another(one, digest)

    def get_file(self, one: Descriptor, new: Path) -> Path:
        """Return a file of a blob, verified: ``new``, which is made."""
        self.download(one, new)
        return new

    def _download_by_cache(self, _one: Descriptor, _path: Path) -> bool:
        """Get all of a blob from a cache, verified. Returns whether one had it."""
        return False

    def parts(self, one: Descriptor, done: int = 0) -> Iterator[bytes]:
        """Yield a blob from byte ``done`` on, unverified; a download that breaks goes
        on. Raises RegistryError, and InvalidImageError for what is longer."""
        breaks = 0
        while done < one.size:
            try:
                for part in self._rest(one, done):
                    if done + len(part) > one.size:
                        raise self._is_another(one, "a longer one")
                    done += len(part)
                    breaks = 0
                    yield part
            except NoAnswer as error:
                breaks += 1
                if breaks >= MAX_BREAKS:
                    raise RegistryError(
                        f"{self.place}: blob {one.digest} breaks at byte {done}: "
                        f"{error}",
                        hint="try again: it goes on from there",
                    ) from error
                log.info("%s: %s broke at %d", self.place, one.digest, done)

    def _is_another(self, one: Descriptor, what: str) -> InvalidImageError:
        return InvalidImageError(
            f"{self.place} answers for blob {one.digest} with {what}",
            hint="what is there is damaged, or somebody between has changed it",
        )


def read_rest(
    connection: Connection, path: str, place: str, one: Descriptor, done: int
) -> Iterator[bytes]:
    """Yield what is at ``path`` of a server, from byte ``done`` on. Raises
    RegistryError, NoAnswer."""
    headers = {"Range": f"bytes={done}-"} if done else {}
    with connection.request(
        "GET", path, what=f"get the blob {one.digest}", ok=(200, 206), headers=headers
    ) as response:
        skipped = done if response.status_code == 200 else 0
        if not skipped and done:
            expected = f"bytes {done}-{one.size - 1}/{one.size}"
            if response.headers.get("Content-Range") != expected:
                raise RegistryError(
                    f"{place} answers for {expected} of blob {one.digest} "
                    f"with {response.headers.get('Content-Range')!r}"
                )
        count = 0
        with deadline(response, one.size - done + skipped):
            for part in response.iter_content(COPY_BYTES):
                rest = part[min(skipped, len(part)) :]
                skipped -= len(part) - len(rest)
                count += len(rest)
                if rest:
                    yield rest
        if not count:
            raise NoAnswer("the server sent nothing")


def bounded(response: Answer, what: str) -> bytes:
    """Return the body of an answer that is a document. Raises RegistryError,
    InvalidImageError."""
    data = bytearray()
    try:
        with deadline(response, MAX_DOCUMENT_BYTES):
            for part in response.iter_content(COPY_BYTES):
                data += part
                if len(data) > MAX_DOCUMENT_BYTES:
                    raise InvalidImageError(
                        f"{what} has more than {MAX_DOCUMENT_BYTES} bytes"
                    )
    except NoAnswer as error:
        raise RegistryError(f"{what} breaks at byte {len(data)}: {error}") from error
    return bytes(data)
