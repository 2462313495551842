"""What comes first in an image's data: the content that was read when another build of
the image was started, as a trace has it."""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from btrfs_ublk.content.trace import Trace
from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.documents import (
    CREATED,
    EMPTY,
    EMPTY_BYTES,
    MANIFEST,
    TAG,
    TRACE,
    TRACED,
    describe,
    to_bytes,
)
from btrfs_ublk.image.extents import FileExtent, list_extents
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pack import read_header, unpack
from btrfs_ublk.image.pull import look_up, open_sealed
from btrfs_ublk.image.reference import LayoutName, Name, Reference
from btrfs_ublk.image.repository import Repository
from btrfs_ublk.image.start.programs import Range
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.image.traces import Extent as TraceExtent
from btrfs_ublk.image.traces import fitting, joined, write_trace
from btrfs_ublk.image.transfer import open_repository


def traced_ranges(
    trace: Trace, layout: Path | None, traced: Name | None, access: RegistryAccess
) -> list[Range]:
    """Return what of an image's files a trace has read, in that order.

    The image is ``traced``, or else one of the layout or of the local store that has
    the digests that the trace names. Raises UsageError when there is none, and what
    inspect_image() raises. Of an image in a registry, only the metadata are fetched.
    """
    roots = {source.root for source in trace.sources.values() if source.root}
    with tempfile.TemporaryDirectory(prefix="btrfs-ublk-") as work:
        seed = Path(work, "seed.img")
        pack = _pack_of(roots, layout, traced, access, Path(work, "pack"))
        header, _ = unpack(pack, seed)
        extents = list_extents(seed, header.layers[-1].subvolume)
    reads = [
        (run.unit * source.unit, (run.unit + run.count) * source.unit)
        for run in trace.reads
        if (source := trace.sources[run.source]).root == header.root
    ]
    return list(_in_order(extents, reads))


def _in_order(
    extents: list[FileExtent], reads: list[tuple[int, int]]
) -> Iterator[Range]:
    """Yield the files' ranges that ``reads`` of the data lie in, each once."""
    ends = [extent.end for extent in extents]
    seen: set[int] = set()
    for start, end in reads:
        number = bisect_right(ends, start)
        while number < len(extents) and extents[number].start < end:
            if number not in seen:
                seen.add(number)
                found = extents[number]
                for path in found.paths:
                    yield Range(path, found.offset, found.length)
            number += 1


def _pack_of(
    roots: set[str],
    layout: Path | None,
    traced: Name | None,
    access: RegistryAccess,
    new: Path,
) -> Path:
    """Return the verified metadata pack of the image whose digests have one of these
    roots. ``new`` is a file for it, if it has to be fetched."""
    for pack in _packs(layout, traced, access, new):
        if read_header(pack).root in roots:
            return pack
    if traced is not None:
        raise UsageError(f"the trace was not recorded of {traced}")
    raise UsageError(
        "the image that the trace was recorded of is not among the images on this "
        f"machine{f', nor in {layout}' if layout else ''}",
        hint="name it: --traced IMAGE",
    )


def _packs(
    layout: Path | None, traced: Name | None, access: RegistryAccess, new: Path
) -> Iterator[Path]:
    if isinstance(traced, Reference):
        with open_repository(traced, access) as repository:
            _, _, manifest = look_up(traced, repository)
            repository.download(manifest.pack, new)
            yield new
        return
    if traced is not None:
        opened, manifest, _ = open_sealed(traced)
        yield opened.verify(manifest.pack)
        return
    if layout is not None and layout.exists():
        for image in Layout.opened(layout).images():
            with suppress(UsageError):  # It is an ordinary image.
                name = LayoutName(layout, image.annotations.get(TAG, image.digest))
                opened, manifest, _ = open_sealed(name)
                yield opened.verify(manifest.pack)
    for stored in ImageStore().images():
        yield stored.pack


@dataclass(frozen=True, kw_only=True)
class PushedTrace:
    """A trace that was pushed. ``subject`` is the digest of the image's manifest."""

    digest: str
    subject: str
    traced_bytes: int
    left_out_bytes: int


def push_trace(
    trace: Trace, reference: Reference, repository: Repository
) -> PushedTrace:
    """Store what a trace has read of an image beside it. Raises UsageError for a trace
    of another image, RegistryError, InvalidImageError."""
    _, data, sealed = look_up(reference, repository)
    with tempfile.TemporaryDirectory(prefix="btrfs-ublk-") as work:
        pack = repository.get_file(sealed.pack, Path(work, "pack"))
        header = read_header(pack)
        roots = {header.root: 0}
        if header.sources:
            _, digests = unpack(pack, Path(work, "seed.img"))
            roots = {
                digests.part(each.offset, each.data_bytes).root: each.offset
                for each in header.sources
            }
    read = _whole_units(trace, roots, header.unit, header.data_bytes)
    kept = fitting(read)
    if not kept:
        raise UsageError(
            f"the trace has read nothing of {reference}",
            hint="record it while this image is up: btrfs-ublk trace record",
        )
    when = datetime.now(timezone.utc)  # the newest one counts
    annotations = {
        CREATED: when.isoformat(timespec="microseconds"),
        TRACE: write_trace(kept),
    }
    empty = describe(EMPTY, EMPTY_BYTES)
    subject = describe(MANIFEST, data)
    manifest = to_bytes(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": TRACED,
            "config": dict(empty.raw),
            "layers": [dict(empty.raw)],
            "subject": dict(subject.raw),
            "annotations": annotations,
        }
    )
    if not repository.has(empty):
        repository.upload_bytes(empty, EMPTY_BYTES)
    one = describe(MANIFEST, manifest, artifactType=TRACED, annotations=annotations)
    repository.put_referrer(one, subject.digest, manifest)
    return PushedTrace(
        digest=one.digest,
        subject=subject.digest,
        traced_bytes=sum(x for _, x in kept),
        left_out_bytes=sum(x for _, x in read) - sum(x for _, x in kept),
    )


def _whole_units(
    trace: Trace, roots: dict[str, int], unit: int, data_bytes: int
) -> list[TraceExtent]:
    """Return what a trace has read, in whole units, in that order, each once."""
    found: list[TraceExtent] = []
    seen: set[int] = set()
    for run in trace.reads:
        source = trace.sources[run.source]
        if source.root is None or (base := roots.get(source.root)) is None:
            continue
        for number in trace.units_of(run, unit, source.size):
            start = base + number * unit
            if start in seen or start >= data_bytes:
                continue
            seen.add(start)
            found.append((start, min(unit, data_bytes - start)))
    return joined(found)
