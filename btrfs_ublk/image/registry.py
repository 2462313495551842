"""A repository of a container registry (OCI distribution specification 1.1)."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from btrfs_ublk.base.log import log
from btrfs_ublk.image.access import RegistryAccess, RegistryError, registry_mirrors
from btrfs_ublk.image.connection import REDIRECTIONS, Connection
from btrfs_ublk.image.documents import (
    INDEX,
    INDEXES,
    MANIFESTS,
    Descriptor,
    InvalidImageError,
    digest_of,
    parse_index,
)
from btrfs_ublk.image.reference import Reference
from btrfs_ublk.image.repository import (
    MAX_BREAKS,
    Document,
    Progress,
    Repository,
    bounded,
    no_progress,
    read_rest,
)
from btrfs_ublk.image.transport import Answer, NoAnswer
from btrfs_ublk.kernel.new_file import new_file

#: What a broken upload loses at most.
CHUNK_BYTES = 16 << 20
#: Caches that are asked for a blob before the registry.
_MAX_CACHES = 2
#: Of what a cache sends; a slice is a multiple of it.
_CACHE_PART_BYTES = 4 << 10
#: It may end its answers so often, and once more after so many bytes.
_CACHE_CUTS, _CACHE_CUT_BYTES = 16, 256 << 10
_PAUSE_S = 0.1
#: Of lists of referrers.
_MAX_PAGES = 16
#: Answers of registries that list no referrers.
_NO_INTERFACE = (301, 302, 303, 307, 308, 400, 404, 405, 406)
_ACCEPT = ", ".join((*INDEXES, *MANIFESTS))


@contextmanager
def _passed_over() -> Iterator[None]:
    """Take a mirror's failure for no answer: the next place is asked."""
    try:
        yield
    except (RegistryError, InvalidImageError, NoAnswer) as error:
        log.info("%s", error)


class RegistryRepository(Repository):
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
        mirrors = () if writing else registry_mirrors(reference.registry)
        self._mirrors = {
            mirror: Connection(
                mirror.host,
                reference.repository,
                replace(access, ca_file=mirror.ca_file, insecure=mirror.insecure),
                base=mirror.base,
                namespace=mirror.namespace,
                tries=1,
            )
            for mirror in mirrors
        }

    def close(self) -> None:
        for connection in (*self._mirrors.values(), self._connection):
            connection.close()

    def _path(self, rest: str) -> str:
        return f"{self._repository}/{rest}"

    def document(self, version: str) -> Document:
        """Return the index or manifest of a tag or digest. Raises RegistryError, and
        InvalidImageError for what has another digest."""
        by_digest = version.startswith("sha256:")
        for mirror, connection in self._mirrors.items():
            if by_digest or mirror.resolves:
                with _passed_over():
                    return self._document(connection, version)
        return self._document(self._connection, version)

    def _document(self, connection: Connection, version: str) -> Document:
        with connection.request(
            "GET",
            self._path(f"manifests/{version}"),
            what=f"get the manifest {version}",
            ok=(200,),
            headers={"Accept": _ACCEPT},
        ) as response:
            data = bounded(response, f"manifest {version} of {connection.place}")
            media_type = _media_type(response)
        digest = digest_of(data)
        if version.startswith("sha256:") and digest != version:
            raise InvalidImageError(
                f"{connection.place} answers for {version} with {digest}",
                hint="the registry is damaged, or somebody between has changed it",
            )
        return Document(digest, media_type, data)

    def has_document(self, version: str) -> bool:
        return self._exists(f"manifests/{version}", {"Accept": _ACCEPT})

    def has(self, one: Descriptor) -> bool:
        return self._exists(f"blobs/{one.digest}", {})

    def _exists(self, path: str, headers: dict[str, str]) -> bool:
        # NB: who is sent elsewhere has an answer. There, a signature for GET counts.
        with self._connection.request(
            "HEAD",
            self._path(path),
            what=f"look for {path}",
            ok=(200, 404, *REDIRECTIONS),
            headers=headers,
            leave=False,
        ) as response:
            return response.status_code != 404

    def put_document(self, version: str, media_type: str, data: bytes) -> bool:
        """Store an index or a manifest; all that it names must be there. Returns
        whether the registry lists it among those that refer to its subject."""
        response = self._write(
            "PUT",
            self._path(f"manifests/{version}"),
            f"put the manifest {version}",
            (201,),
            data,
            media_type=media_type,
        )
        return "OCI-Subject" in response.headers

    def _write(
        self,
        method: str,
        path: str,
        what: str,
        ok: tuple[int, ...],
        data: bytes = b"",
        *,
        media_type: str = "application/octet-stream",
        headers: Mapping[str, str] | None = None,
        tries: int | None = None,
    ) -> Answer:
        """Ask for a change. Returns the head of the answer."""
        return self._connection.request(
            method,
            path,
            what=what,
            ok=ok,
            headers={"Content-Type": media_type, **(headers or {})} if data else {},
            body=None if method in ("GET", "DELETE") else data,
            tries=tries,
        )

    def referrers(self, digest: str) -> list[Descriptor]:
        """Return what refers to a manifest, by the registry's interface for that; those
        without it have a tag instead. Raises RegistryError, InvalidImageError."""
        for connection in self._mirrors.values():
            with _passed_over():
                if found := self._referrers_by_interface(connection, digest):
                    return found
        try:
            found = self._referrers_by_interface(self._connection, digest)
        except RegistryError as error:
            # There may be a tag, but that there is none says nothing then.
            if found := self._referrers_by_tag(digest):
                return found
            raise error
        return self._referrers_by_tag(digest) if found is None else found

    def _referrers_by_interface(
        self, connection: Connection, digest: str
    ) -> list[Descriptor] | None:
        """None: the registry has no such interface."""
        found: list[Descriptor] = []
        path: str | None = self._path(f"referrers/{digest}")
        where = f"the referrers of {digest} in {connection.place}"
        for _ in range(_MAX_PAGES):
            assert path is not None
            with connection.request(
                "GET",
                path,
                what=f"ask for {where}",
                ok=(200, *_NO_INTERFACE),
                leave=False,
            ) as response:
                # Some answer with a page for people, or lead to one.
                if response.status_code != 200 or _media_type(response) != INDEX:
                    return None
                data = bounded(response, where)
                path = response.next_link
            found += parse_index(data, where)
            if path is None:
                break
            path = connection.url(path)
        return found

    def get_blob(self, one: Descriptor) -> bytes:
        """Return a small blob, verified; mirrors are asked first."""
        for connection in self._mirrors.values():
            with _passed_over():
                data = b"".join(self._parts_of_mirror(connection, one))
                if digest_of(data) == one.digest:
                    return data
                log.warning("%s: wrong bytes of %s", connection.place, one.digest)
        return super().get_blob(one)

    def _download_by_cache(self, one: Descriptor, path: Path) -> bool:
        """Get all of a blob from a mirror or a cache, verified. Returns whether one had
        it."""
        where = self._path(f"blobs/{one.digest}")
        places = {
            connection.place: self._parts_of_mirror(connection, one)
            for connection in self._mirrors.values()
        }
        if not path.exists() or not path.stat().st_size:
            for cache in self._connection.caches(where)[:_MAX_CACHES]:
                places[cache] = self._parts_of_cache(cache, where, one.size)
        return any(self._take(x, parts, one, path) for x, parts in places.items())

    def _parts_of_mirror(
        self, connection: Connection, one: Descriptor
    ) -> Iterator[bytes]:
        """Yield a blob of a mirror, unverified. Raises RegistryError, NoAnswer."""
        count = 0
        where = self._path(f"blobs/{one.digest}")
        for part in read_rest(connection, where, connection.place, one, 0):
            count += len(part)
            if count > one.size:
                raise NoAnswer("it sends more")
            yield part

    def _take(
        self, place: str, parts: Iterator[bytes], one: Descriptor, path: Path
    ) -> bool:
        """Get all of a blob from one place. Returns whether it is right."""
        found = hashlib.sha256()
        # What is at ``path`` counts as the registry's, also after a kill. So what
        # others send has no name before it is verified.
        with (
            _passed_over(),
            new_file(path, replace=True, synced=True) as new,
            open(new.fileno(), "wb", closefd=False) as file,
        ):
            for part in parts:
                file.write(part)
                found.update(part)
            if f"sha256:{found.hexdigest()}" == one.digest:
                return True
            log.warning("%s: %s has wrong bytes", self.place, place)
            raise NoAnswer("wrong bytes")
        return False

    def _parts_of_cache(self, cache: str, where: str, size: int) -> Iterator[bytes]:
        """Yield the bytes of a blob. A site cache that lacks the next slice ends its
        answer, and is asked for the rest. Raises NoAnswer."""
        count = before = 0
        cuts_left = _CACHE_CUTS + size // _CACHE_CUT_BYTES
        while not count or count < size:
            asked = {"Range": f"bytes={count}-"} if count else {}
            with self._connection.ask_cache(cache, where, asked) as response:
                if response.status_code != (206 if count else 200):
                    raise NoAnswer(f"HTTP {response.status_code}")
                try:
                    for part in response.iter_content(_CACHE_PART_BYTES):
                        count += len(part)
                        if count > size:
                            raise NoAnswer("it sends more")
                        yield part
                except NoAnswer as error:
                    if count > size or isinstance(error.__cause__, TimeoutError):
                        raise
                    log.debug("%s: cache %s has sent %d bytes", where, cache, count)
            cuts_left -= 1
            if count == before or (count < size and not cuts_left):
                raise NoAnswer("it sends less")
            before = count

    def _rest(self, one: Descriptor, done: int) -> Iterator[bytes]:
        path = self._path(f"blobs/{one.digest}")
        return read_rest(self._connection, path, self.place, one, done)

    def mount(self, digest: str, repository: str) -> bool:
        """Take a blob over from another repository of the registry. Returns False when
        that is not possible, which says nothing about why."""
        self._connection.also(f"repository:{repository}:pull")
        query = urlencode({"mount": digest, "from": repository})
        path = self._path(f"blobs/uploads/?{query}")
        try:
            response = self._write("POST", path, f"mount blob {digest}", (201, 202))
            if response.status_code == 201:
                return True
            if location := response.headers.get("Location"):
                ended = (200, 202, 204, 404, 405)
                self._write("DELETE", location, "end an upload", ended)
        except RegistryError as error:
            log.info("%s", error)
        return False

    def upload(
        self, one: Descriptor, path: Path, progress: Progress = no_progress
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
                except (NoAnswer, RegistryError) as error:
                    breaks += 1
                    if breaks >= MAX_BREAKS or not _is_passing(error):
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
        self._end(one, self._begin(one), data)

    def _begin(self, one: Descriptor) -> str:
        what, path = f"begin to upload blob {one.digest}", self._path("blobs/uploads/")
        return self._location(self._write("POST", path, what, (202,)))

    def _send(
        self, one: Descriptor, fd: int, location: str, start: int, end: int
    ) -> str:
        response = self._write(
            "PATCH",
            location,
            f"upload blob {one.digest}",
            (202, 204),
            os.pread(fd, end - start, start),
            headers={"Content-Range": f"{start}-{end - 1}"},
            tries=1,  # as the registry may have taken a part of a chunk
        )
        return self._location(response)

    def _reached(self, one: Descriptor, location: str) -> tuple[str, int]:
        """Ask how much of an upload has arrived. One that the registry has given up
        (distribution 2 does so when it has a part of a chunk) begins anew."""
        what = f"ask for the upload of blob {one.digest}"
        with self._write("GET", location, what, (204, 400, 404, 416)) as response:
            if response.status_code == 204:
                last = response.headers.get("Range", "").rpartition("-")[2]
                # "0-0" means none.
                end = int(last) + 1 if last.isdigit() and int(last) else 0
                return self._location(response), min(end, one.size)
        return self._begin(one), 0

    def _end(self, one: Descriptor, location: str, data: bytes = b"") -> None:
        url = _with_digest(self._connection.url(location), one.digest)
        self._write("PUT", url, f"finish the upload of blob {one.digest}", (201,), data)

    def _location(self, response: Answer) -> str:
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


def _media_type(response: Answer) -> str:
    return response.headers.get("Content-Type", "").partition(";")[0].strip()
