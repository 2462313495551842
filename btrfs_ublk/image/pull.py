"""Getting sealed images: from a registry, into the store; from a layout, as they are.

Only manifests and the metadata pack are fetched, verified down from the digest of the
index. The data stay where they are until they are read.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from btrfs_ublk.base.records import dataclass
from btrfs_ublk.errors import UsageError, writing
from btrfs_ublk.image.access import RegistryAccess, RegistryError
from btrfs_ublk.image.documents import (
    ARTIFACT,
    INDEXED,
    Descriptor,
    InvalidImageError,
    SealedManifest,
    Start,
    choose_platform,
    created_s,
    embedded,
    is_index,
    manifests_of,
    may_be_sealed,
    ordinary_images,
    parse_document,
    parse_index,
    parse_sealed_manifest,
    platform_in,
    sealed_in,
)
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.policy import Policy, RefusedImageError, read_policy, signer_of
from btrfs_ublk.image.reference import LayoutName, Name, Reference
from btrfs_ublk.image.repository import Document, Repository
from btrfs_ublk.image.store import ImageStore, StoredImage
from btrfs_ublk.image.transfer import open_repository

if TYPE_CHECKING:
    from btrfs_ublk.image.pack import PackHeader

_NOT_SEALED_HINT = (
    "make a sealed one: btrfs-ublk image convert IMAGE NEW, or image build and image "
    "push; or an index of it: image index and image push"
)
#: An index may have other things for no platform, as attestations.
_MAX_CANDIDATES = 16
#: How long a pull, and what is up already, wait for a trace.
_TRACE_PULLED_S, _TRACE_UP_S = 3.0, 0.2


class NotSealedError(UsageError):
    """A name is that of an ordinary image only."""


@dataclass(frozen=True)
class PulledImage:
    """An image that was pulled: its digest, why it was allowed, and what was moved."""

    reference: Reference
    digest: str
    why: str
    fetched_bytes: int


def find_sealed(
    data: bytes, name: object, read: Callable[[Descriptor], bytes]
) -> bytes:
    """Return the manifest of the sealed image that an index, or a manifest itself, has.
    ``read`` gets a document, verified. Raises UsageError when there is none."""
    where = str(name)
    document = parse_document(data, where)
    if not is_index(document):
        if "artifactType" not in document:
            raise NotSealedError(
                f"{where} is an ordinary image only", hint=_NOT_SEALED_HINT
            )
        return data
    manifests = manifests_of(document, where, read)
    found = {}
    for one in may_be_sealed(manifests)[:_MAX_CANDIDATES]:
        candidate = read(one)
        if parse_document(candidate, one.digest).get("artifactType") == ARTIFACT:
            found[one.digest] = candidate
    ordinary = ordinary_images(manifests)
    if found and (len(found) > 1 or len(ordinary) > 1):
        # Layers say which sealed image has them; another one is of another platform.
        chosen = parse_document(read(choose_platform(manifests, None, where)), where)
        wanted = sealed_in(chosen)
        found = {digest: data for digest, data in found.items() if digest in wanted}
    for data in found.values():
        return data
    raise NotSealedError(f"{where} has no sealed image", hint=_NOT_SEALED_HINT)


def open_sealed(name: LayoutName) -> tuple[Layout, SealedManifest, bytes]:
    """Return the layout, and the sealed image in it, with its manifest. Raises
    UsageError, InvalidImageError."""
    layout = Layout.opened(name.path)
    image = layout.find(name.tag)
    data = find_sealed(layout.read(image), name, layout.read)
    return layout, parse_sealed_manifest(data, str(name)), data


@contextmanager
def opened_sealed(
    name: Name, access: RegistryAccess
) -> Iterator[tuple[Layout | Repository, SealedManifest, bytes]]:
    """Open what holds a sealed image, to read; see open_sealed(), look_up()."""
    if isinstance(name, LayoutName):
        yield open_sealed(name)
        return
    with open_repository(name, access) as repository:
        _, data, manifest = look_up(name, repository)
        yield repository, manifest, data


def look_up(
    reference: Reference, repository: Repository
) -> tuple[Document, bytes, SealedManifest]:
    """Return what a reference names, and the manifest of the sealed image in it. Where
    it has none, that of an indexed image is taken which refers to the ordinary one."""
    document, candidates = _candidates(reference, repository, repository.read)
    return document, *candidates[0]


def _candidates(
    reference: Reference, repository: Repository, read: Callable[[Descriptor], bytes]
) -> tuple[Document, list[tuple[bytes, SealedManifest]]]:
    """Return what a reference names, and what may be meant by it, best first: one
    sealed image, or several indexed ones."""
    document = repository.document(reference.version)
    try:
        data = find_sealed(document.data, reference, read)
    except NotSealedError as error:
        try:
            found = _find_indexed(document, reference, repository)
        except (RegistryError, InvalidImageError) as why:
            raise NotSealedError(
                f"{error.message}; what refers to it cannot be listed: {why.message}",
                hint=error.hint,
            ) from why
        if not found:
            raise
        return document, found
    return document, [(data, parse_sealed_manifest(data, str(reference)))]


def _find_indexed(
    document: Document, reference: Reference, repository: Repository
) -> list[tuple[bytes, SealedManifest]]:
    """Return the indexed images that refer to the ordinary one, newest first, as far as
    they say when they were made, and then the last first."""
    subject, where = document.digest, str(reference)
    parsed = parse_document(document.data, where)
    if is_index(parsed):
        manifests = manifests_of(parsed, where, repository.read)
        subject = choose_platform(manifests, None, where).digest
    found = [
        each
        for each in repository.referrers(subject)
        if each.raw.get("artifactType") == INDEXED
    ]
    made = []
    for one in sorted(found[::-1], key=created_s, reverse=True)[:_MAX_CANDIDATES]:
        data = repository.document(one.digest).data
        # A list of referrers is anybody's word.
        with suppress(InvalidImageError):
            sealed = parse_sealed_manifest(data, one.digest)
            if sealed.subject is not None and sealed.subject.digest == subject:
                made.append((data, sealed))
    return made


def _check_layers(
    pack: Path, sealed: SealedManifest, reference: Reference, repository: Repository
) -> None:
    """Raise InvalidImageError unless the data of an indexed image are in layers of its
    subject."""
    from btrfs_ublk.image.pack import check_data, read_header

    header = read_header(pack)
    check_data(header, sealed.data_bytes, indexed=sealed.subject is not None)
    if sealed.subject is not None:
        from btrfs_ublk.image.indexed import check_subject

        subject = repository.document(sealed.subject.digest)
        where = f"{reference.place}@{subject.digest}"
        check_subject(header, parse_document(subject.data, where), where)


def _listing(repository: Repository, name: Reference, digest: str) -> list[str]:
    """Return the digest of the index of that name, if it has the manifest."""
    index = repository.document(name.version)
    if not is_index(parse_document(index.data, str(name))):
        return []
    manifests = parse_index(index.data, str(name))
    return [index.digest] if any(one.digest == digest for one in manifests) else []


class Pull:
    """A sealed image whose manifest is there, and that the policy lets in; ``why`` says
    why. A thread fetches its pack meanwhile, unless it is in the store (``stored``)."""

    def __init__(
        self,
        reference: Reference,
        repository: Repository,
        sealed: SealedManifest,
        manifest: bytes,
        why: str,
    ) -> None:
        self.reference, self.sealed, self.why = reference, sealed, why
        self.fetched_bytes = 0
        self.stored: StoredImage | None = None
        self._repository, self._manifest = repository, manifest
        self._new: Path | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._unwanted = False
        #: What the newest trace that refers to the image has read, once that is known.
        self.trace: list[tuple[int, int]] = []
        self._tracing: threading.Thread | None = None

    @property
    def start(self) -> Start | None:
        """What can be begun with before the pack is there."""
        return self.sealed.start

    def begin(self, new: Path) -> None:
        """Begin to fetch the pack into a directory."""
        self._new = new
        self._thread = threading.Thread(target=self._fetch, daemon=True)
        self._thread.start()
        if not self.sealed.traced:
            self._tracing = threading.Thread(target=self._find_trace, daemon=True)
            self._tracing.start()

    def _find_trace(self) -> None:
        from btrfs_ublk.image.traces import find_trace

        with suppress(Exception):  # the repository may be closed meanwhile
            self.trace = find_trace(self.sealed.digest, self._repository)

    def _fetch(self) -> None:
        assert self._new is not None
        try:
            with writing(f"write to {self._new}"):
                self._repository.download(
                    self.sealed.pack, self._new / "pack", self._count
                )
        except BaseException as error:
            self._error = error

    def _count(self, _bytes: int) -> None:
        if self._unwanted:
            raise InterruptedError

    def pack(self) -> Path:
        """Wait for the pack, and return where it is, verified. Raises RegistryError,
        InvalidImageError, InvalidPackError, BtrfsUblkError."""
        assert self._new is not None
        pack, thread = self._new / "pack", self._thread
        if thread is not None:
            thread.join()
            if self._error is not None:
                raise self._error
            _check_layers(pack, self.sealed, self.reference, self._repository)
            self._thread = None
        return pack

    def end(self) -> None:
        """Have the thread end soon."""
        self._unwanted = True
        if self._thread is not None:
            self._repository.close()

    def keep(
        self,
        store: ImageStore,
        *,
        pinned: bool = False,
        trace_within_s: float = _TRACE_UP_S,
    ) -> None:
        """Put the image into the store, with its trace if that comes within so many
        seconds. Raises as pack() does."""
        if self._new is not None:
            self.pack()
            if self._tracing is not None:
                self._tracing.join(trace_within_s)
            store.add(self._new, self._manifest, self.trace)
            self.fetched_bytes += self.sealed.pack.size
        store.name(str(self.reference), self.sealed.digest, pinned=pinned)


@contextmanager
def pulling(
    reference: Reference,
    access: RegistryAccess,
    store: ImageStore,
    *,
    policy: Policy | None = None,
    listed_in: Reference | None = None,
) -> Iterator[Pull]:
    """Begin to get the metadata of a sealed image; see pull_image(). What is not in the
    store at the end is dropped."""
    policy = policy or read_policy()
    with open_repository(reference, access) as repository, ExitStack() as stack:
        document, candidates = _candidates(
            reference, repository, lambda one: embedded(one) or repository.read(one)
        )
        # Who may write to the repository can add what refers to an image of it, so what
        # is said of that image, by its digest or a signature, does not count for it.
        sealed = candidates[0][1]
        is_referrer = sealed.subject is not None and document.digest != sealed.digest

        def find_signer(sealed: SealedManifest, keys: Sequence[Path]) -> Path | None:
            signed = [sealed.digest]
            if not is_referrer:
                signed.insert(0, document.digest)
                if listed_in is not None:
                    signed += _listing(repository, listed_in, sealed.digest)
            found = (signer_of(repository, x, keys) for x in dict.fromkeys(signed))
            return next(filter(None, found), None)

        refused: RefusedImageError | None = None
        for data, sealed in candidates:
            try:
                why = policy.allow(
                    reference,
                    partial(find_signer, sealed),
                    indexed=sealed.digest if is_referrer else None,
                )
                break
            except RefusedImageError as error:
                refused = refused or error
        else:
            assert refused is not None
            raise refused
        found = Pull(reference, repository, sealed, data, why)
        is_apart = data is not document.data
        found.fetched_bytes = len(document.data) + len(data) * is_apart
        found.stored = stack.enter_context(store.holding(sealed.digest))
        if found.stored is None:
            new = stack.enter_context(store.adding())
            stack.callback(found.end)
            found.begin(new)
        yield found


def pull_image(
    reference: Reference,
    access: RegistryAccess,
    store: ImageStore,
    *,
    policy: Policy | None = None,
    pinned: bool = False,
    listed_in: Reference | None = None,
) -> PulledImage:
    """Get the metadata of a sealed image into the store. Raises RegistryError,
    InvalidImageError, and RefusedImageError when the policy does not let it in.

    ``listed_in`` names an index of the same repository, for an image that is named by
    its own digest: a signature of the index counts as well, if the image is in it.
    """
    with pulling(reference, access, store, policy=policy, listed_in=listed_in) as found:
        found.keep(store, pinned=pinned, trace_within_s=_TRACE_PULLED_S)
    return PulledImage(reference, found.sealed.digest, found.why, found.fetched_bytes)


@dataclass(frozen=True)
class ImageReport:
    """A sealed image: its manifest, and what its metadata pack says."""

    name: str
    manifest: SealedManifest
    header: PackHeader

    @property
    def metadata_bytes(self) -> int:
        return sum(length for _, length in self.header.extents)

    @property
    def platform(self) -> str:
        parts = platform_in(self.header.config).values()
        return "/".join(str(part) for part in parts if part) or "-"

    def to_dict(self) -> dict[str, Any]:
        """What fits in JSON."""
        return {
            "name": self.name,
            "digest": self.manifest.digest,
            "platform": self.platform,
            "fsid": self.header.fsid,
            "pack_bytes": self.manifest.pack.size,
            "metadata_bytes": self.metadata_bytes,
            "data_bytes": self.header.data_bytes,
            "first_bytes": self.header.first_bytes,
            "data_digest": self.manifest.data.digest if self.manifest.data else None,
            "unit_bytes": self.header.unit,
            "root": self.header.root,
            "layers": [vars(layer) for layer in self.header.layers],
            "subject": self.manifest.subject.digest if self.manifest.subject else None,
            "sources": [vars(source) for source in self.header.sources],
        }


def inspect_image(name: Name, access: RegistryAccess) -> ImageReport:
    """Look at an image of a layout or a registry; nothing of it is used otherwise.
    Raises UsageError, RegistryError, InvalidImageError, InvalidPackError."""
    from btrfs_ublk.image.pack import read_header

    with (
        opened_sealed(name, access) as (place, manifest, _),
        tempfile.TemporaryDirectory() as new,
    ):
        pack = place.get_file(manifest.pack, Path(new, "pack"))
        return ImageReport(str(name), manifest, read_header(pack))
