"""A repository of a container registry (OCI distribution specification 1.1)."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit, urlunsplit

import requests

from btrfs_ublk.base.log import log
from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.connection import (
    Connection,
    RegistryAccess,
    RegistryError,
    deadline,
)
from btrfs_ublk.image.documents import (
    INDEX,
    INDEXES,
    MANIFESTS,
    MAX_DOCUMENT_BYTES,
    Descriptor,
    InvalidImageError,
    descriptors,
    digest_of,
    parse_document,
    to_bytes,
)
from btrfs_ublk.image.reference import Reference, check_tag
from btrfs_ublk.kernel.new_file import new_file

_COPY_BYTES = 256 << 10
#: What a broken upload loses at most.
CHUNK_BYTES = 16 << 20
#: Without any progress between them.
_MAX_BREAKS = 5
#: Caches that are asked for a blob before the registry.
_MAX_CACHES = 2
_PAUSE_S = 0.1
#: Of lists of referrers.
_MAX_PAGES = 16
#: Answers of registries that list no referrers.
_NO_INTERFACE = (301, 302, 303, 307, 308, 400, 404, 405, 406)
_ACCEPT = ", ".join((*INDEXES, *MANIFESTS))

Progress = Callable[[int], object]


def _nothing(_count: int) -> None:
    pass


@dataclass(frozen=True)
class Document:
    """An index or a manifest, as it is in the registry, verified."""

    digest: str
    media_type: str
    data: bytes


class Repository:
    """A repository of a registry, to read, or to write as well."""

    def __init__(
        self, reference: Reference, access: RegistryAccess, *, writing: bool = False
    ) -> None:
        self.place = reference.place
        self._repository = reference.repository
        self._connection = Connection(
            reference.registry,
            reference.repository,
            access,
            actions="pull,push" if writing else "pull",
        )

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Repository:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _path(self, rest: str) -> str:
        return f"{self._repository}/{rest}"

    def document(self, version: str) -> Document:
        """Return the index or manifest of a tag or digest. Raises RegistryError, and
        InvalidImageError for what has another digest."""
        with self._connection.request(
            "GET",
            self._path(f"manifests/{version}"),
            what=f"get the manifest {version}",
            ok=(200,),
            headers={"Accept": _ACCEPT},
        ) as response:
            data = _bounded(response, f"manifest {version} of {self.place}")
            media_type = _media_type(response)
        digest = digest_of(data)
        if version.startswith("sha256:") and digest != version:
            raise InvalidImageError(
                f"{self.place} answers for {version} with {digest}",
                hint="the registry is damaged, or somebody between has changed it",
            )
        return Document(digest, media_type, data)

    def tags(self) -> list[str]:
        """Return the names of all images of the repository. Raises RegistryError,
        InvalidImageError."""
        found: list[str] = []
        path = self._path("tags/list")
        where = f"the tags of {self.place}"
        for _ in range(_MAX_PAGES):
            with self._connection.request(
                "GET", path, what=f"list {where}", ok=(200,)
            ) as response:
                data = _bounded(response, where)
                more = response.links.get("next", {}).get("url")
            try:
                names = json.loads(data).get("tags") or []
                found += [check_tag(name) for name in names]
            except (ValueError, TypeError, AttributeError, UsageError) as error:
                raise InvalidImageError(f"{where}: no list of tags: {error}") from error
            if more is None:
                return found
            # NB: it may be relative to the path of this request.
            path = urljoin(self._connection.url(path), more)
        raise RegistryError(f"{self.place} has more than {len(found)} tags, too many")

    def has_document(self, version: str) -> bool:
        return self._exists(f"manifests/{version}", {"Accept": _ACCEPT})

    def has_blob(self, digest: str) -> bool:
        return self._exists(f"blobs/{digest}", {})

    def _exists(self, path: str, headers: dict[str, str]) -> bool:
        with self._connection.request(
            "HEAD",
            self._path(path),
            what=f"look for {path}",
            ok=(200, 404),
            headers=headers,
        ) as response:
            return response.status_code == 200

    def put_document(self, version: str, media_type: str, data: bytes) -> bool:
        """Store an index or a manifest; all that it names must be there. Returns
        whether the registry lists it among those that refer to its subject."""
        with self._connection.request(
            "PUT",
            self._path(f"manifests/{version}"),
            what=f"put the manifest {version}",
            ok=(201,),
            headers={"Content-Type": media_type},
            body=lambda: data,
        ) as response:
            return "OCI-Subject" in response.headers

    def referrers(self, digest: str) -> list[Descriptor]:
        """Return what refers to a manifest, by the registry's interface for that; those
        without it have a tag instead. Raises RegistryError, InvalidImageError."""
        try:
            found = self._referrers_by_interface(digest)
        except RegistryError as error:
            # There may be a tag, but that there is none says nothing then.
            if found := self._referrers_by_tag(digest):
                return found
            raise error
        return self._referrers_by_tag(digest) if found is None else found

    def _referrers_by_interface(self, digest: str) -> list[Descriptor] | None:
        """None: the registry has no such interface."""
        found: list[Descriptor] = []
        path: str | None = self._path(f"referrers/{digest}")
        where = f"the referrers of {digest} in {self.place}"
        for _ in range(_MAX_PAGES):
            assert path is not None
            with self._connection.request(
                "GET",
                path,
                what=f"ask for {where}",
                ok=(200, *_NO_INTERFACE),
                leave=False,
            ) as response:
                # Some answer with a page for people, or lead to one.
                if response.status_code != 200 or _media_type(response) != INDEX:
                    return None
                data = _bounded(response, where)
                path = response.links.get("next", {}).get("url")
            found += descriptors(parse_document(data, where), "manifests", where)
            if path is None:
                break
            path = self._connection.url(path)
        return found

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
        where = f"{self.place}:{tag}"
        return descriptors(parse_document(found.data, where), "manifests", where)

    def put_referrer(self, one: Descriptor, subject: str, data: bytes) -> None:
        """Store a manifest that refers to another one, so that referrers() has it as
        the last."""
        if self.put_document(one.digest, one.media_type, data):
            return
        # NB: two that do this at once may lose one; the specification has no lock.
        others = [x for x in self._referrers_by_tag(subject) if x.digest != one.digest]
        index = {
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": [dict(each.raw) for each in (*others, one)],
        }
        self.put_document(subject.replace(":", "-"), INDEX, to_bytes(index))

    def get_blob(self, one: Descriptor) -> bytes:
        """Return a small blob, verified."""
        if one.size > MAX_DOCUMENT_BYTES:
            raise InvalidImageError(
                f"blob {one.digest} of {self.place} has {one.size} bytes, too many"
            )
        with self._connection.request(
            "GET",
            self._path(f"blobs/{one.digest}"),
            what=f"get the blob {one.digest}",
            ok=(200,),
        ) as response:
            data = _bounded(response, f"blob {one.digest} of {self.place}")
        if digest_of(data) != one.digest:
            raise self._is_another(one, digest_of(data))
        return data

    def download(
        self, one: Descriptor, path: Path, progress: Progress = _nothing
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
            while part := file.read(_COPY_BYTES):
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

    def _download_by_cache(self, one: Descriptor, path: Path) -> bool:
        """Get all of a blob from a cache, verified. Returns whether one had it."""
        where = self._path(f"blobs/{one.digest}")
        caches = self._connection.caches(where)[:_MAX_CACHES]
        if not caches or (path.exists() and path.stat().st_size):
            return False
        return any(self._ask_cache(cache, where, one, path) for cache in caches)

    def _ask_cache(self, cache: str, where: str, one: Descriptor, path: Path) -> bool:
        """Get all of a blob from one cache. Returns whether it is right."""
        found, count = hashlib.sha256(), 0
        try:
            # What is at ``path`` counts as the registry's, also after a kill. So what
            # a cache sends has no name before it is verified.
            with (
                self._connection.ask_cache(cache, where) as response,
                new_file(path, replace=True, synced=True) as new,
                open(new.fileno(), "wb", closefd=False) as file,
            ):
                if response.status_code != 200:
                    raise requests.HTTPError(f"HTTP {response.status_code}")
                for part in response.iter_content(_COPY_BYTES):
                    count += len(part)
                    if count > one.size:
                        raise requests.HTTPError("it sends more")
                    file.write(part)
                    found.update(part)
                if f"sha256:{found.hexdigest()}" != one.digest:
                    log.warning("%s: cache %s has wrong bytes", self.place, cache)
                    raise requests.HTTPError("wrong bytes")
        except requests.RequestException as error:
            log.info("%s: cache %s: %s", self.place, cache, type(error).__name__)
            return False
        return True

    def caches(self, one: Descriptor) -> tuple[str, list[str]]:
        """Return the URL of a blob, and the caches in front of it, in the order in
        which hosts ask them for the whole of it."""
        where = self._path(f"blobs/{one.digest}")
        return self._connection.url(where), self._connection.caches(where)

    def range_of_cache(
        self, cache: str, one: Descriptor, start: int, end: int
    ) -> tuple[bytes, Mapping[str, str]]:
        """Get a range of a blob from a cache, unverified, and the answer's headers.
        Raises requests.RequestException. Several threads may do so."""
        where = self._path(f"blobs/{one.digest}")
        asked = {"Range": f"bytes={start}-{end - 1}"}
        with self._connection.ask_cache(cache, where, asked) as response:
            if response.status_code != 206:
                raise requests.HTTPError(f"HTTP {response.status_code}")
            with deadline(response, end - start):
                # NB: one that knows no ranges would send more than there is memory.
                data = response.raw.read(end - start + 1)
            if len(data) != end - start:
                raise requests.HTTPError(f"{len(data)} bytes of {end - start}")
            return data, response.headers

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
            except requests.RequestException as error:
                breaks += 1
                if breaks >= _MAX_BREAKS:
                    raise RegistryError(
                        f"{self.place}: blob {one.digest} breaks at byte {done}: "
                        f"{error}",
                        hint="try again: it goes on from there",
                    ) from error
                log.info("%s: %s broke at %d", self.place, one.digest, done)

    def _rest(self, one: Descriptor, done: int) -> Iterator[bytes]:
        headers = {"Range": f"bytes={done}-"} if done else {}
        with self._connection.request(
            "GET",
            self._path(f"blobs/{one.digest}"),
            what=f"get the blob {one.digest}",
            ok=(200, 206),
            headers=headers,
        ) as response:
            skipped = done if response.status_code == 200 else 0
            if not skipped and done:
                expected = f"bytes {done}-{one.size - 1}/{one.size}"
                if response.headers.get("Content-Range") != expected:
                    raise RegistryError(
                        f"{self.place} answers for {expected} of blob {one.digest} "
                        f"with {response.headers.get('Content-Range')!r}"
                    )
            count = 0
            with deadline(response, one.size - done + skipped):
                for part in response.iter_content(_COPY_BYTES):
                    rest = part[min(skipped, len(part)) :]
                    skipped -= len(part) - len(rest)
                    count += len(rest)
                    if rest:
                        yield rest
            if not count:
                raise requests.ConnectionError("the registry sent nothing")

    def _is_another(self, one: Descriptor, what: str) -> InvalidImageError:
        return InvalidImageError(
            f"{self.place} answers for blob {one.digest} with {what}",
            hint="the registry is damaged, or somebody between has changed it",
        )

    def mount(self, digest: str, repository: str) -> bool:
        """Take a blob over from another repository of the registry. Returns False when
        that is not possible, which says nothing about why."""
        self._connection.also(f"repository:{repository}:pull")
        query = urlencode({"mount": digest, "from": repository})
        try:
            with self._connection.request(
                "POST",
                self._path(f"blobs/uploads/?{query}"),
                what=f"mount the blob {digest}",
                ok=(201, 202),
                body=lambda: b"",
            ) as response:
                if response.status_code == 201:
                    return True
                location = response.headers.get("Location")
            if location:
                self._cancel(location)
        except RegistryError as error:
            log.info("%s", error)
        return False

    def _cancel(self, location: str) -> None:
        with self._connection.request(
            "DELETE", location, what="end an upload", ok=(200, 202, 204, 404, 405)
        ):
            pass

    def upload(
        self, one: Descriptor, path: Path, progress: Progress = _nothing
    ) -> None:
        """Store a blob from a file, in chunks; after a break, the upload goes on where
        the registry says. Raises RegistryError, OSError."""
        with open(path, "rb") as file:
            location = self._begin(one)
            done = furthest = breaks = 0
            while done < one.size:
                end = min(done + CHUNK_BYTES, one.size)
                try:
                    location = self._send(one, file.fileno(), location, done, end)
                except (requests.RequestException, RegistryError) as error:
                    breaks += 1
                    if breaks >= _MAX_BREAKS or not _is_passing(error):
                        raise
                    log.info("%s", error)
                    # The registry may still be writing what it got of a chunk.
                    time.sleep(_PAUSE_S * breaks)
                    location, end = self._reached(one, location)
                if end > furthest:
                    breaks, furthest = 0, end
                progress(end - done)
                done = end
            self._end(one, location)

    def upload_bytes(self, one: Descriptor, data: bytes) -> None:
        """Store a small blob."""
        location = self._begin(one)
        with self._connection.request(
            "PUT",
            _with_digest(self._connection.url(location), one.digest),
            what=f"upload the blob {one.digest}",
            ok=(201,),
            headers={"Content-Type": "application/octet-stream"},
            body=lambda: data,
        ):
            pass

    def _begin(self, one: Descriptor) -> str:
        with self._connection.request(
            "POST",
            self._path("blobs/uploads/"),
            what=f"begin to upload the blob {one.digest}",
            ok=(202,),
            body=lambda: b"",
        ) as response:
            return self._location(response)

    def _send(
        self, one: Descriptor, fd: int, location: str, start: int, end: int
    ) -> str:
        # NB: one try only, as the registry may have taken a part of a chunk.
        with self._connection.request(
            "PATCH",
            location,
            what=f"upload the blob {one.digest}",
            ok=(202, 204),
            headers={
                "Content-Type": "application/octet-stream",
                "Content-Range": f"{start}-{end - 1}",
            },
            body=lambda: os.pread(fd, end - start, start),
            tries=1,
        ) as response:
            return self._location(response)

    def _reached(self, one: Descriptor, location: str) -> tuple[str, int]:
        """Ask how much of an upload has arrived. One that the registry has given up
        (distribution 2 does so when it has a part of a chunk) begins anew."""
        with self._connection.request(
            "GET",
            location,
            what=f"ask for the upload of blob {one.digest}",
            ok=(204, 400, 404, 416),
        ) as response:
            if response.status_code == 204:
                last = response.headers.get("Range", "").rpartition("-")[2]
                # "0-0" stands for none.
                end = int(last) + 1 if last.isdigit() and int(last) else 0
                return self._location(response), min(end, one.size)
        return self._begin(one), 0

    def _end(self, one: Descriptor, location: str) -> None:
        with self._connection.request(
            "PUT",
            _with_digest(self._connection.url(location), one.digest),
            what=f"finish the upload of blob {one.digest}",
            ok=(201,),
            body=lambda: b"",
        ):
            pass

    def _location(self, response: requests.Response) -> str:
        location = response.headers.get("Location")
        if not location:
            raise RegistryError(f"{self.place} does not say where to upload to")
        return self._connection.url(location)


def _is_passing(error: Any) -> bool:
    """Whether an upload can go on, or begin anew, after this."""
    status = error.status if isinstance(error, RegistryError) else None
    # 400, 404 and 416: the registry has another part of it than we know of.
    return status in (None, 400, 404, 416, 429) or status >= 500


def _with_digest(url: str, digest: str) -> str:
    parts = urlsplit(url)
    query = [*parse_qsl(parts.query, keep_blank_values=True), ("digest", digest)]
    return urlunsplit(parts._replace(query=urlencode(query)))


def _media_type(response: requests.Response) -> str:
    return response.headers.get("Content-Type", "").partition(";")[0].strip()


def _bounded(response: requests.Response, what: str) -> bytes:
    data = bytearray()
    try:
        with deadline(response, MAX_DOCUMENT_BYTES):
            for part in response.iter_content(_COPY_BYTES):
                data += part
                if len(data) > MAX_DOCUMENT_BYTES:
                    raise InvalidImageError(
                        f"{what} has more than {MAX_DOCUMENT_BYTES} bytes"
                    )
    except requests.RequestException as error:
        raise RegistryError(f"{what} breaks at byte {len(data)}: {error}") from error
    return bytes(data)
