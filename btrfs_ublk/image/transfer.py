"""Opening what holds images by name, and moving them between it and layouts here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from btrfs_ublk.base.records import dataclass
from btrfs_ublk.device.locks import lock_file
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess, RegistryError
from btrfs_ublk.image.documents import (
    CREATED,
    INDEXED,
    MAX_DOCUMENT_BYTES,
    Descriptor,
    InvalidImageError,
    blobs_of,
    describe,
    descriptors,
    digest_of,
    is_index,
    parse_document,
    parse_index,
    parse_sealed_manifest,
)
from btrfs_ublk.image.layout import Layout, StoredLayout
from btrfs_ublk.image.reference import LayoutName, Name, Reference
from btrfs_ublk.image.repository import Progress, Repository, no_progress
from btrfs_ublk.units import format_size

_MAX_DEPTH = 4
#: How long a blob may take that another command fetches.
_FETCH_TIMEOUT_S = 3600.0


def open_repository(
    reference: Reference, access: RegistryAccess, *, writing: bool = False
) -> Repository:
    """Return the repository that a reference names, to read, or to write as well.
    Raises UsageError."""
    if reference.is_in_registry:
        from btrfs_ublk.image.registry import RegistryRepository

        return RegistryRepository(reference, access, writing=writing)
    return StoredLayout(reference, access, writing=writing)


@contextmanager
def open_place(name: Name, access: RegistryAccess) -> Iterator[Layout | Repository]:
    """Open what holds an image, to read. Raises UsageError."""
    if isinstance(name, LayoutName):
        yield Layout.opened(name.path)
    else:
        with open_repository(name, access) as repository:
            yield repository


@contextmanager
def open_image(
    name: Name, access: RegistryAccess
) -> Iterator[tuple[Layout | Repository, Descriptor, bytes]]:
    """Open what holds an image, to read. Yields it with the image's index or manifest,
    verified. Raises UsageError, RegistryError, InvalidImageError."""
    with open_place(name, access) as place:
        if isinstance(place, Layout):
            one = place.find(name.tag)
            yield place, one, place.read(one)
        else:
            assert isinstance(name, Reference)
            found = place.document(name.version)
            yield place, describe(found.media_type, found.data), found.data


@dataclass
class Pushed:
    """What a push did. Sizes are bytes."""

    digest: str
    uploaded: int = 0
    uploaded_bytes: int = 0
    mounted: int = 0
    there: int = 0

    def to_dict(self) -> dict[str, str | int]:
        """Return what fits in JSON."""
        return dict(vars(self))

    @property
    def summary(self) -> str:
        return (
            f"{self.uploaded} blobs sent ({format_size(self.uploaded_bytes)}), "
            f"{self.mounted} mounted, {self.there} were there"
        )


def walk(
    layout: Layout, one: Descriptor, depth: int = 0
) -> Iterator[tuple[Descriptor, bytes | None]]:
    """Yield all that an image in a layout consists of, each after what it names:
    documents with their bytes, blobs without. Raises InvalidImageError."""
    if not one.is_document:
        layout.check(one)
        yield one, None
        return
    if depth > _MAX_DEPTH:
        raise InvalidImageError(f"{one.digest}: indexes are within indexes too deep")
    data = layout.read(one)
    document = parse_document(data, one.digest)
    if is_index(document):
        below = iter(descriptors(document, "manifests", one.digest))
    else:
        below = blobs_of(document, one.digest)
    for each in below:
        yield from walk(layout, each, depth + 1)
    yield one, data


def push_image(
    layout: Layout,
    one: Descriptor,
    target: Reference,
    repository: Repository,
    *,
    mount_from: str | None = None,
    tagged: Callable[[bytes], bytes] = lambda document: document,
    progress: Progress = no_progress,
) -> Pushed:
    """Store an image of a layout in a registry, by the tag of ``target``. Blobs that
    are there, or in the repository ``mount_from`` of the same registry, are not sent.
    The tag changes when all else is there; ``tagged`` returns the document that it gets
    instead of the image's own. Raises RegistryError, InvalidImageError.

    An indexed image gets no tag: it refers to the image that has the tag already.
    Raises UsageError when that is another one than its subject.
    """
    done = Pushed(one.digest)
    subject = None
    if one.raw.get("artifactType") == INDEXED:
        subject = _check_subject(layout, one, target, repository)
    seen = set()
    for each, data in list(walk(layout, one)):
        if each.digest in seen:
            continue
        seen.add(each.digest)
        if data is None:
            _push_blob(layout, each, repository, mount_from, done, progress)
        elif subject is not None:
            repository.put_referrer(_as_referrer(one), subject, data)
        elif each.digest != one.digest or target.tag is None:
            repository.put_document(each.digest, each.media_type, data)
    if target.tag is not None and subject is None:
        document = tagged(layout.read(one))
        done.digest = digest_of(document)
        repository.put_document(target.tag, one.media_type, document)
    return done


def _check_subject(
    layout: Layout, one: Descriptor, target: Reference, repository: Repository
) -> str:
    """Return the digest of the image that an indexed one is of."""
    subject = parse_sealed_manifest(layout.read(one), one.digest).subject
    assert subject is not None
    there: list[str] = []
    try:
        found = repository.document(target.version)
    except RegistryError as error:
        if error.status != 404:
            raise
    else:
        there = [found.digest]
        if is_index(parse_document(found.data, str(target))):
            there += [each.digest for each in parse_index(found.data, str(target))]
    if subject.digest not in there:
        raise UsageError(
            f"{target} is not the image {subject.digest}, which this one indexes: "
            + (f"it is {there[0]}" if there else "there is none of that name"),
            hint="push it to the repository and the tag that it was made of, or index "
            "that image anew: btrfs-ublk image index",
        )
    return subject.digest


def _as_referrer(one: Descriptor) -> Descriptor:
    """Leave out what is of the layout only."""
    keys = ("mediaType", "digest", "size", "artifactType")
    raw = {key: one.raw[key] for key in keys}
    if CREATED in one.annotations:
        raw["annotations"] = {CREATED: one.annotations[CREATED]}
    return Descriptor(one.media_type, one.digest, one.size, raw)


def _push_blob(
    layout: Layout,
    one: Descriptor,
    repository: Repository,
    mount_from: str | None,
    done: Pushed,
    progress: Progress,
) -> None:
    if repository.has(one):
        done.there += 1
        progress(one.size)
    elif mount_from is not None and repository.mount(one.digest, mount_from):
        done.mounted += 1
        progress(one.size)
    else:
        if one.size <= MAX_DOCUMENT_BYTES:
            repository.upload_bytes(one, layout.read(one))
            progress(one.size)
        else:
            repository.upload(one, layout.check(one), progress)
        done.uploaded += 1
        done.uploaded_bytes += one.size


def bring(
    layout: Layout,
    one: Descriptor,
    source: Layout | Repository,
    progress: Progress = no_progress,
) -> None:
    """Have a blob of an image in a layout. Raises RegistryError, InvalidImageError,
    BtrfsUblkError, OSError."""
    if isinstance(source, Layout):
        layout.copy(one, source)
        progress(one.size)
    elif not layout.has(one):
        fetch_blob(layout, source, one, progress=progress)


def fetch_blob(
    layout: Layout,
    repository: Repository,
    one: Descriptor,
    *,
    progress: Progress = no_progress,
) -> None:
    """Copy a blob of a registry into a layout. Another command that fetches it is
    waited for. Raises RegistryError, BtrfsUblkError, OSError."""
    part = layout.path / "blobs" / f".part-{one.digest.partition(':')[2]}"
    # NB: what a cache sends replaces the part, so that could not be locked itself.
    locked = part.with_name(f"{part.name}.lock")
    lock = lock_file(locked, timeout_s=_FETCH_TIMEOUT_S)
    if lock is None:
        raise BtrfsUblkError(
            f"another command fetches {one.digest} into {layout.path} for "
            f"{_FETCH_TIMEOUT_S:g} s",
            hint=f"see which: fuser {locked}",
        )
    with lock:
        try:
            if not layout.has(one):
                repository.download(one, part, progress)
                layout.take(part, one.media_type)
        finally:
            locked.unlink(missing_ok=True)
