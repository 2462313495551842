"""Traces that refer to images: what a host has recorded of a start, in a registry, for
hosts that start the image later (docs/design/images.md, "What a start reads")."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress

from btrfs_ublk.base.log import log
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.documents import (
    TRACE,
    TRACED,
    Descriptor,
    created_s,
    parse_document,
)
from btrfs_ublk.image.repository import Repository
from btrfs_ublk.units import BLOCK_BYTES, MIB

#: (offset, length) in the data of an image, in bytes.
Extent = tuple[int, int]
#: What a trace that anybody can push makes others fetch, and how long it is, where a
#: registry's list of referrers has it.
MAX_BYTES, MAX_TEXT = 256 * MIB, 32 << 10
#: How many are looked at until one is valid.
_TRIED = 3


def joined(extents: Iterable[Extent]) -> list[Extent]:
    """Return extents in their order, with those that follow each other as one."""
    found: list[Extent] = []
    for start, length in extents:
        if found and sum(found[-1]) == start:
            start, before = found.pop()
            length += before
        found.append((start, length))
    return found


def fitting(extents: Iterable[Extent]) -> list[Extent]:
    """Return the extents that a trace may have, from the first on."""
    found, left, text = [], MAX_BYTES, MAX_TEXT - 2
    for extent in extents:
        left, text = left - extent[1], text - len(write_trace([extent]))
        if left < 0 or text < 0:
            break
        found.append(extent)
    return found


def write_trace(extents: Sequence[Extent]) -> str:
    return json.dumps(extents, separators=(",", ":"))


def find_trace(digest: str, repository: Repository) -> list[Extent]:
    """Return what the newest trace of an image has read: nothing, where none can be
    had. A trace only decides what is fetched first."""
    with suppress(BtrfsUblkError):
        found = [
            each
            for each in repository.referrers(digest)
            if each.raw.get("artifactType") == TRACED
        ]
        for one in sorted(found, key=created_s, reverse=True)[:_TRIED]:
            text = one.annotations.get(TRACE) or _annotation(one, repository)
            extents = parse_trace(text)
            if extents is not None:
                return extents
            log.warning("the trace %s of %s is not valid", one.digest, digest)
    return []


def _annotation(one: Descriptor, repository: Repository) -> object:
    """Return what the manifest says: not all registries list annotations."""
    document = parse_document(repository.document(one.digest).data, one.digest)
    annotations = document.get("annotations")
    return annotations.get(TRACE) if isinstance(annotations, dict) else None


def parse_trace(text: object) -> list[Extent] | None:
    """Return the extents that a text has; None for what is no such text."""
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        return None
    try:
        found = json.loads(text)
        extents = [(start, length) for start, length in found]
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = [number for each in extents for number in each]
    if not all(
        type(x) is int and 0 <= x < 1 << 62 and not x % BLOCK_BYTES for x in numbers
    ):
        return None
    return extents if sum(x for _, x in extents) <= MAX_BYTES else None


def placed(
    extents: Sequence[Extent], sources: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """Return what of (number, offset, length), sources of the data, lies in extents, as
    (number, offset in the source, length)."""
    return [
        (number, max(start, offset) - offset, end - max(start, offset))
        for start, length in extents
        for number, offset, size in sources
        if (end := min(start + length, offset + size)) > max(start, offset)
    ]
