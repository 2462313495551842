"""OCI image layouts in an S3 bucket, or behind a web server: the files of a layout, by
the same names, so that it can be copied from and to a directory by any tool.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess, RegistryError
from btrfs_ublk.image.connection import Connection
from btrfs_ublk.image.documents import (
    INDEX,
    MANIFEST,
    TAG,
    Descriptor,
    InvalidImageError,
    describe,
    descriptors,
    digest_of,
    is_index,
    parse_document,
    to_bytes,
)
from btrfs_ublk.image.layout import INDEX_NAME, MARK, MARK_TEXT, blob_name
from btrfs_ublk.image.reference import Reference, check_tag
from btrfs_ublk.image.repository import (
    Document,
    Files,
    Found,
    Progress,
    Repository,
    bounded,
    no_progress,
    read_rest,
)

#: How often a change of index.json is tried while others change it.
_MAX_CHANGES = 20
_PAUSE_S = 0.2


class WebFiles(Files):
    """Files of a web server that answers requests for ranges."""

    def __init__(self, reference: Reference, access: RegistryAccess) -> None:
        self.place = reference.place
        self._connection = Connection(
            reference.registry, reference.repository, access, base=f"{self.place}/"
        )

    def close(self) -> None:
        self._connection.close()

    def read(self, name: str) -> Found | None:
        with self._connection.request(
            "GET", name, what=f"get {name}", ok=(200, 404)
        ) as response:
            if response.status_code == 404:
                return None
            data = bounded(response, f"{self.place}/{name}")
            return Found(data, response.headers.get("ETag"))

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
        self._files: Files
        if reference.is_in_bucket:
            from btrfs_ublk.image.s3 import S3Files

            self._files = S3Files(reference, access)
        else:
            self._files = WebFiles(reference, access)
        if writing and not reference.is_in_bucket:
            raise self._files.refuse_writing()
        if writing and not self._files.has(MARK):
            self._files.write(MARK, MARK_TEXT.encode())

    def close(self) -> None:
        self._files.close()

    def _images(self) -> tuple[list[Descriptor], str | None]:
        """Return what index.json lists, and its version; None where there is none."""
        found = self._files.read(INDEX_NAME)
        if found is None:
            return [], None
        where = f"{self.place}/{INDEX_NAME}"
        document = parse_document(found.data, where)
        return descriptors(document, "manifests", where), found.version

    def document(self, version: str) -> Document:
        """As Repository.document()."""
        digest, media_type = version, None
        if not version.startswith("sha256:"):
            images, _ = self._images()
            one = next((x for x in images if x.annotations.get(TAG) == version), None)
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
        if digest_of(found.data) != digest:
            raise InvalidImageError(
                f"{self.place} has for {digest} the content {digest_of(found.data)}",
                hint="it was changed, or is damaged: push the image again",
            )
        parsed = parse_document(found.data, digest)
        kind = parsed.get("mediaType") or (INDEX if is_index(parsed) else MANIFEST)
        return Document(digest, media_type or str(kind), found.data)

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
            return self.has_blob(version)
        return version in self.tags()

    def has_blob(self, digest: str) -> bool:
        return self._files.has(blob_name(digest))

    def put_document(self, version: str, media_type: str, data: bytes) -> bool:
        """As Repository.put_document(). A tag is put into index.json, beside what
        others put there meanwhile."""
        self._files.write(blob_name(digest_of(data)), data)
        if not version.startswith("sha256:"):
            one = describe(media_type, data)
            self._tag(check_tag(version), lambda images: one)
        return False

    def put_referrer(self, one: Descriptor, subject: str, data: bytes) -> None:
        """As Repository.put_referrer(), beside what others put there meanwhile."""
        self._files.write(blob_name(one.digest), data)
        tag = subject.replace(":", "-")

        def listed(images: list[Descriptor]) -> Descriptor:
            before = next((x for x in images if x.annotations.get(TAG) == tag), None)
            found = self._listed(before.digest) if before is not None else []
            others = [dict(x.raw) for x in found if x.digest != one.digest]
            document = {
                "schemaVersion": 2,
                "mediaType": INDEX,
                "manifests": [*others, dict(one.raw)],
            }
            self._files.write(
                blob_name(digest_of(to_bytes(document))), to_bytes(document)
            )
            return describe(INDEX, to_bytes(document))

        self._tag(tag, listed)

    def _listed(self, digest: str) -> list[Descriptor]:
        data = self.document(digest).data
        return descriptors(parse_document(data, digest), "manifests", digest)

    def _tag(self, tag: str, make: Callable[[list[Descriptor]], Descriptor]) -> None:
        """Name what ``make`` makes of the images that are there."""
        for _ in range(_MAX_CHANGES):
            images, version = self._images()
            manifest = dict(make(images).raw) | {"annotations": {TAG: tag}}
            others = [x for x in images if x.annotations.get(TAG) != tag]
            index = {
                "schemaVersion": 2,
                "mediaType": INDEX,
                "manifests": [*(dict(each.raw) for each in others), manifest],
            }
            if self._files.replace(INDEX_NAME, to_bytes(index), version):
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
        self._files.upload(blob_name(one.digest), path, progress)

    def upload_bytes(self, one: Descriptor, data: bytes) -> None:
        self._files.write(blob_name(one.digest), data)

    def _rest(self, one: Descriptor, done: int) -> Iterator[bytes]:
        return self._files.rest(blob_name(one.digest), one, done)
