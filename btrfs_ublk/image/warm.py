"""Fills the caches of a site with an image, before its hosts ask for it."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import requests

from btrfs_ublk.base.hosts import HITS, SLICE_HEADER, cache_status
from btrfs_ublk.base.log import log
from btrfs_ublk.content.digests import DIGEST_BYTES, Digests
from btrfs_ublk.content.trace import Trace
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.connection import reason_of
from btrfs_ublk.image.documents import Descriptor, InvalidImageError, SealedManifest
from btrfs_ublk.image.indexed import layer_blob, unit_ranges
from btrfs_ublk.image.pack import PackHeader, check_data, read_digests
from btrfs_ublk.image.pull import look_up
from btrfs_ublk.image.reference import Reference
from btrfs_ublk.image.registry import RegistryRepository

#: Requests that are under way at once.
_PARALLEL = 8
#: Of the caches of an object, a host asks that many before the origin.
_ASKED = 2
_ROUNDS, _PAUSE_S = 2, 1.0
#: Hosts choose a cache for that much of an object (csrc/lazy/choice.c).
_CHOSEN_BYTES = 4 << 20
_DEFAULT_SLICE_BYTES = 256 << 10
_SLICE_BYTES = range(4 << 10, (16 << 20) + 1)
_MASK = (1 << 64) - 1

Progress = Callable[[int], object]


@dataclass
class WarmReport:
    """What was asked for, of which ``hit_bytes`` were there already; None when the
    caches do not say."""

    image: str
    digest: str
    asked_bytes: int = 0
    hit_bytes: int | None = None
    requests: int = 0


def warm_image(
    reference: Reference,
    access: RegistryAccess,
    *,
    trace: Trace | None = None,
    first: bool = False,
    expect: Progress = lambda total: None,
    progress: Progress = lambda count: None,
    say: Callable[[str], object] = lambda text: None,
) -> WarmReport:
    """Ask the caches in front of a registry, those of ``access``, for an image's
    metadata pack and data as its hosts do, slice by slice, and compare what comes with
    the digests. Nothing is kept.

    ``trace`` limits the data to what it has read, ``first`` to what comes first in the
    image. Raises UsageError, RegistryError, InvalidImageError, InvalidPackError, and
    BtrfsUblkError when a slice cannot be got through the caches.
    """
    if not reference.is_in_registry:
        raise UsageError(
            f"{reference} is not in a registry, and only those are warmed",
            hint="read it on one host: what it fetches, the caches keep",
        )
    with RegistryRepository(reference, access) as repository:
        _, _, sealed = look_up(reference, repository)
        report = WarmReport(str(reference), sealed.digest)
        if not repository.caches(sealed.pack)[1]:
            raise UsageError(
                f"no cache is known in front of {reference.registry}",
                hint="name those of the site: --site http://CACHE:3128",
            )
        warming = _Warming(repository, report, progress)
        expect(sealed.pack.size + sealed.data_bytes)
        say("metadata")
        with tempfile.TemporaryDirectory(prefix="btrfs-ublk-") as directory:
            pack = Path(directory, "pack")
            warming.get_pack(sealed.pack, pack)
            header, digests = read_digests(pack, pack.parent)
            check_data(header, sealed.data_bytes, indexed=sealed.subject is not None)
            places = _places_of(sealed, header, digests, pack.parent)
        say("data")
        runs = _first_runs(header) if first else _runs_of(places, trace)
        parts = _parts_of(places, runs, warming.slice_bytes)
        expect(sealed.pack.size + sum(part.end - part.start for part in parts))
        warming.get_data(parts, digests if sealed.data is not None else None)
    return report


class _Part(NamedTuple):
    """A range of a blob. Hosts choose the caches that they ask for it by ``place``, in
    bytes of their source."""

    blob: Descriptor
    start: int
    end: int
    place: int


@dataclass(frozen=True)
class _Place:
    """A source as hosts have it. Of a layer, ``ranges`` are those of it that the units
    need; None: units are in the blob one after the other."""

    blob: Descriptor
    root: str
    unit: int
    count: int
    ranges: list[tuple[int, int]] | None = None

    def range_of(self, unit: int) -> tuple[int, int]:
        if self.ranges is not None:
            return self.ranges[unit]
        return unit * self.unit, min((unit + 1) * self.unit, self.blob.size)


#: A place, and units of it: the first one, and the one behind the last.
_Run = tuple[int, int, int]


def _places_of(
    sealed: SealedManifest, header: PackHeader, digests: Digests, directory: Path
) -> list[_Place]:
    """Return where the data are; indexes and selections are in ``directory``."""
    if sealed.data is not None:
        count = -(-header.data_bytes // header.unit)
        return [_Place(sealed.data, header.root, header.unit, count)]
    return [
        _Place(
            layer_blob(each),
            digests.part(each.offset, each.data_bytes).root,
            header.unit,
            each.data_bytes // header.unit,
            unit_ranges(header, directory, number),
        )
        for number, each in enumerate(header.sources)
    ]


def _runs_of(places: list[_Place], trace: Trace | None) -> list[_Run]:
    if trace is None:
        return [(number, 0, each.count) for number, each in enumerate(places)]
    numbers = {each.root: number for number, each in enumerate(places)}
    runs = []
    for read in trace.reads:
        number = numbers.get(trace.sources[read.source].root or "")
        if number is not None:
            one = places[number]
            units = trace.units_of(read, one.unit, one.count * one.unit)
            runs.append((number, units.start, units.stop))
    if not any(end > first for _, first, end in runs):
        raise UsageError(
            "the trace has read nothing of this build of the image",
            hint="record one of it: btrfs-ublk trace record",
        )
    return runs


def _first_runs(header: PackHeader) -> list[_Run]:
    if not header.first_bytes:
        raise UsageError(
            "nothing comes first in this image",
            hint="name a trace here, or one when it is built: --trace",
        )
    return [(0, 0, -(-header.first_bytes // header.unit))]


def _parts_of(places: list[_Place], runs: list[_Run], slice_bytes: int) -> list[_Part]:
    """Return what is to be asked for, each once, in that order: slices, or what a unit
    needs where that is more."""
    found: dict[tuple[int, int, int], _Part] = {}
    for number, first, behind in runs:
        one = places[number]
        step = slice_bytes if one.ranges is not None else max(slice_bytes, one.unit)
        for unit in range(first, behind):
            start, end = one.range_of(unit)
            chosen = unit * one.unit // _CHOSEN_BYTES
            for at in range(start // step * step, end, step):
                part = _Part(
                    one.blob, at, min(at + step, one.blob.size), unit * one.unit
                )
                found.setdefault((number, at, chosen), part)
    return list(found.values())


def _cut(one: Descriptor, step: int) -> Iterator[_Part]:
    for start in range(0, one.size, step):
        yield _Part(one, start, min(start + step, one.size), start)


@dataclass
class _Warming:
    """``slice_bytes`` are those of the caches, as soon as one has told."""

    repository: RegistryRepository
    report: WarmReport
    progress: Progress
    slice_bytes: int = _DEFAULT_SLICE_BYTES
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get_pack(self, one: Descriptor, path: Path) -> None:
        """Get the metadata pack, verified, into a new file."""
        _, caches = self.repository.caches(one)
        with open(path, "x+b") as file:

            def take(part: _Part) -> None:
                data = self._get(caches[:_ASKED], part)
                os.pwrite(file.fileno(), data, part.start)

            # The first answer says how large the slices are.
            first, *_ = _cut(one, self.slice_bytes)
            take(first)
            rest = (x for x in _cut(one, self.slice_bytes) if x.end > first.end)
            _at_once(take, rest)
        with open(path, "rb") as whole:
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if f"sha256:{found}" != one.digest:
            raise InvalidImageError(
                f"the caches have wrong bytes of the metadata pack {one.digest}",
                hint="remove what they have stored, and restart them",
            )

    def get_data(self, parts: Iterable[_Part], digests: Digests | None) -> None:
        """Get the parts, and compare them with the digests of units, if there are."""

        def take(part: _Part) -> None:
            url, caches = self.repository.caches(part.blob)
            self._get(_chosen(caches, url, part.place)[:_ASKED], part, digests)

        _at_once(take, parts)

    def _get(
        self,
        caches: list[str],
        part: _Part,
        digests: Digests | None = None,
    ) -> bytes:
        """Get a part from the first of the caches that has it."""
        one, start, end, _ = part
        why = ""
        for number in range(_ROUNDS * len(caches)):
            if number and number % len(caches) == 0:
                time.sleep(_PAUSE_S)
            cache = caches[number % len(caches)]
            try:
                data, headers = self.repository.range_of_cache(cache, one, start, end)
            except (requests.RequestException, OSError) as error:
                why = f"{cache}: {reason_of(error)}"
            else:
                if digests is None or _is_right(data, start, digests):
                    self._count(len(data), headers)
                    return data
                why = f"{cache} has wrong bytes"
            log.info("bytes %d to %d of %s: %s", start, end - 1, one.digest, why)
        raise BtrfsUblkError(
            f"cannot get bytes {start} to {end - 1} of {one.digest} by a cache: {why}",
            hint="`btrfs-ublk site-cache check` says what is wrong with a cache; what "
            "was got is there when this is tried again",
        )

    def _count(self, count: int, headers: Mapping[str, str]) -> None:
        status = cache_status(headers)
        with self._lock:
            self.slice_bytes = _slice_bytes(headers) or self.slice_bytes
            self.report.requests += 1
            self.report.asked_bytes += count
            if status is not None:
                hit = count if status in HITS else 0
                self.report.hit_bytes = (self.report.hit_bytes or 0) + hit
            self.progress(count)


def _at_once(take: Callable[[_Part], None], parts: Iterable[_Part]) -> None:
    """Call ``take`` with each of the parts, several at a time, until one fails."""
    rest, lock, over = iter(parts), threading.Lock(), threading.Event()

    def work() -> None:
        try:
            while not over.is_set():
                with lock:
                    part = next(rest, None)
                if part is None:
                    return
                take(part)
        except BaseException:
            over.set()
            raise

    with ThreadPoolExecutor(_PARALLEL) as pool:
        try:
            for each in [pool.submit(work) for _ in range(_PARALLEL)]:
                each.result()
        finally:
            over.set()


def _slice_bytes(headers: Mapping[str, str]) -> int:
    """Return how large the slices of a front are; 0: it does not say."""
    text = headers.get(SLICE_HEADER, "")
    number = int(text) if text.isdecimal() and len(text) < 10 else 0
    return number if number in _SLICE_BYTES else 0


def _is_right(data: bytes, start: int, digests: Digests) -> bool:
    for at in range(0, len(data), digests.unit_bytes):
        place = (start + at) // digests.unit_bytes * DIGEST_BYTES
        unit = data[at : at + digests.unit_bytes]
        if hashlib.sha256(unit).digest() != digests.units[place : place + DIGEST_BYTES]:
            return False
    return True


def _chosen(caches: list[str], url: str, offset: int) -> list[str]:
    """Return caches in the order in which servers ask them for a part of an object
    (csrc/lazy/choice.c, csrc/lazy/mirror/via.c)."""
    part = offset // _CHOSEN_BYTES

    def weight(cache: str) -> int:
        parts = urlsplit(cache)
        hashed = 0xCBF29CE484222325
        for byte in f"{parts.scheme}://{parts.netloc}{url}".encode():
            hashed = (hashed ^ byte) * 0x100000001B3 & _MASK
        return _mixed(hashed + part & _MASK)

    return sorted(caches, key=weight, reverse=True)


def _mixed(x: int) -> int:
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & _MASK
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ x >> 33
