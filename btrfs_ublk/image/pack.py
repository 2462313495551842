"""The metadata pack: all of a sealed image but its data, in one zstd stream
(docs/design/images.md).

The kernel parses what is in a pack, so a caller of unpack() has verified its digest and
trusts who made it. Nevertheless each number is checked before it is used, and the
number of bytes that are written is bounded.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO, Any
from uuid import UUID

import zstandard

from btrfs_ublk.base.records import dataclass
from btrfs_ublk.content.digests import DIGEST_BYTES, Digests, check_unit
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.documents import (
    DATA_OFFSET,
    MAX_LAYERS,
    MAX_METADATA_BYTES,
    digest_of,
)
from btrfs_ublk.image.reference import check_digest
from btrfs_ublk.units import BLOCK_BYTES, EIB, MIB

MAGIC = b"BTRFSUBLKPACK1\n"
_ANY_VERSION = re.compile(rb"BTRFSUBLKPACK([0-9])\n")
_MAX_HEADER_BYTES = 32 * MIB
_MAX_EXTENTS = 1 << 20
#: Of an index, or a selection, as servers have it.
_MAX_INDEX_BYTES = 256 * MIB
#: Of all of them in a pack: the server has them in memory.
_MAX_INDEXES_BYTES = 512 * MIB
_WINDOW_LOG = 27
#: Level 19 takes 0.55 s for each MiB, which is too long for trees of a million files:
#: level 12 takes a twentieth of that, and its packs are a tenth larger.
_LEVEL, _LEVEL_OF_LARGE, _LARGE_BYTES = 19, 12, 64 * MIB
_COPY_BYTES = MIB
#: Of subvolumes (BTRFS_FIRST_FREE_OBJECTID, BTRFS_LAST_FREE_OBJECTID in btrfs_tree.h).
_SUBVOLUMES = range(256, (1 << 64) - 256 + 1)


class InvalidPackError(BtrfsUblkError):
    """A pack is not as it must be. Nothing was made of it."""

    def __init__(
        self, why: str, *, hint: str = "make the image again: btrfs-ublk image build"
    ) -> None:
        super().__init__(f"the metadata pack cannot be used: {why}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of an image: its subvolume has the tree as it is after that layer. Only
    what was made of a directory has no diff ID."""

    chain_id: str
    subvolume: int
    diff_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSource:
    """Where a part of the data of an indexed image is: in a compressed layer of the
    ordinary one. ``offset`` and ``data_bytes`` are those of the part; it has an index
    of the layer, and a selection of what comes out of it, in the pack."""

    layer: str
    layer_bytes: int
    codec: str
    offset: int
    data_bytes: int
    index_bytes: int
    selection_bytes: int


@dataclass(frozen=True, kw_only=True)
class PackHeader:
    """What a pack says of its image. Sizes and offsets are bytes of the device.

    ``extents`` are the (offset, length) of the local part that are not zeroes. The
    first ``first_bytes`` of the data are those that are read when the image is started.
    ``config`` is that of the ordinary image. ``sources`` has where the data of an
    indexed image are; that of a sealed one has none. The constructor raises
    InvalidPackError.
    """

    local_bytes: int
    device_bytes: int
    data_bytes: int
    first_bytes: int = 0
    extents: tuple[tuple[int, int], ...]
    unit: int
    root: str
    fsid: str
    layers: tuple[Layer, ...]
    config: dict[str, Any]
    sources: tuple[LayerSource, ...] = ()

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_extents()
        self._check_layers()
        self._check_sources()
        try:
            if str(UUID(self.fsid)) != self.fsid:
                raise ValueError
        except ValueError:
            raise InvalidPackError(f"fsid {self.fsid!r} is no UUID") from None

    def _check_sizes(self) -> None:
        for key, least, most in (
            ("local_bytes", BLOCK_BYTES, DATA_OFFSET),
            ("device_bytes", DATA_OFFSET, 4 * EIB),
            ("data_bytes", 0, 4 * EIB),
            ("first_bytes", 0, self.data_bytes),
        ):
            value = getattr(self, key)
            if not least <= value <= most or value % BLOCK_BYTES:
                raise InvalidPackError(
                    f"{key} is {value}, not a multiple of {BLOCK_BYTES} from {least} "
                    f"to {most}"
                )
        if DATA_OFFSET + self.data_bytes > self.device_bytes:
            raise InvalidPackError(
                f"data of {self.data_bytes} bytes do not fit on a device of "
                f"{self.device_bytes}"
            )
        try:
            check_unit(self.unit)
            check_digest(f"sha256:{self.root}", what="root")
        except UsageError as error:
            raise InvalidPackError(error.message) from error

    def _check_extents(self) -> None:
        end = 0
        for offset, length in self.extents:
            if (
                length <= 0
                or offset < end
                or offset % BLOCK_BYTES
                or length % BLOCK_BYTES
                or offset + length > self.local_bytes
            ):
                raise InvalidPackError(
                    f"extent ({offset}, {length}) is not behind {end} and within the "
                    f"local part of {self.local_bytes} bytes, in whole blocks"
                )
            end = offset + length

    def _check_layers(self) -> None:
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise InvalidPackError(f"it has {len(self.layers)} layers")
        expected: str | None = None
        seen: set[int] = set()
        for number, layer in enumerate(self.layers):
            try:
                check_digest(layer.chain_id, what="chain_id")
                if layer.diff_id is not None:
                    check_digest(layer.diff_id, what="diff_id")
            except UsageError as error:
                raise InvalidPackError(f"layer {number}: {error.message}") from error
            if layer.subvolume not in _SUBVOLUMES or layer.subvolume in seen:
                raise InvalidPackError(
                    f"layer {number} has subvolume {layer.subvolume}, which is no "
                    "number of one, or another layer's"
                )
            seen.add(layer.subvolume)
            if layer.diff_id is None:
                continue
            if number == 0 or expected is not None:
                expected = next_chain_id(expected, layer.diff_id)
                if layer.chain_id != expected:
                    raise InvalidPackError(
                        f"layer {number} has chain ID {layer.chain_id}, and its diff "
                        f"IDs make {expected}"
                    )

    def _check_sources(self) -> None:
        if len(self.sources) > MAX_LAYERS:
            raise InvalidPackError(f"it has {len(self.sources)} sources")
        end = 0
        for number, source in enumerate(self.sources):
            try:
                check_digest(source.layer, what="layer")
            except UsageError as error:
                raise InvalidPackError(f"source {number}: {error.message}") from error
            if (
                source.offset != end
                or source.data_bytes <= 0
                or source.data_bytes % self.unit
                or source.layer_bytes <= 0
                or not source.codec
                or not 0 < source.index_bytes <= _MAX_INDEX_BYTES
                or not 0 < source.selection_bytes <= _MAX_INDEX_BYTES
            ):
                raise InvalidPackError(f"source {number} is {str(source)[:500]}")
            end += source.data_bytes
        if self._index_bytes > _MAX_INDEXES_BYTES:
            raise InvalidPackError(
                f"its {len(self.sources)} sources have indexes and selections of "
                f"{self._index_bytes} bytes, and the most is {_MAX_INDEXES_BYTES}"
            )
        if self.sources and end != self.data_bytes:
            raise InvalidPackError(
                f"its sources have {end} bytes of data, and not {self.data_bytes}"
            )

    @property
    def unpacked_bytes(self) -> int:
        """What unpacking writes."""
        return (
            sum(length for _, length in self.extents)
            + self._digest_bytes
            + self._index_bytes
        )

    @property
    def _index_bytes(self) -> int:
        return sum(x.index_bytes + x.selection_bytes for x in self.sources)

    @property
    def _digest_bytes(self) -> int:
        return -(-self.data_bytes // self.unit) * DIGEST_BYTES

    def to_line(self) -> bytes:
        keys = vars(self) | {"layers": [vars(layer) for layer in self.layers]}
        keys["sources"] = [vars(source) for source in self.sources]
        if not self.sources:
            del keys["sources"]
        if not self.first_bytes:
            del keys["first_bytes"]  # Version 0.1.0 does not know it.
        return json.dumps(keys, separators=(",", ":")).encode() + b"\n"


def next_chain_id(previous: str | None, diff_id: str) -> str:
    """Return the chain ID after a layer (OCI image specification, config.md)."""
    return diff_id if previous is None else digest_of(f"{previous} {diff_id}".encode())


_LISTS = ("extents", "layers", "sources")
_TYPES: dict[str, type] = {
    "local_bytes": int,
    "device_bytes": int,
    "data_bytes": int,
    "first_bytes": int,
    "unit": int,
    "root": str,
    "fsid": str,
    "config": dict,
}


def _parse_header(line: bytes) -> PackHeader:
    try:
        keys = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidPackError(f"its header is not JSON: {error}") from error
    if isinstance(keys, dict):
        keys.setdefault("first_bytes", 0)
        keys.setdefault("sources", [])
    if not isinstance(keys, dict) or keys.keys() != {*_TYPES, *_LISTS}:
        raise InvalidPackError(
            "its header has not the keys of a pack: perhaps a newer btrfs-ublk made it"
        )
    for key, kind in _TYPES.items():
        if type(keys[key]) is not kind:
            raise InvalidPackError(f"{key} is {str(keys[key])[:100]!r}")
    extents, layers, sources = (keys.pop(key) for key in _LISTS)
    if not isinstance(extents, list) or len(extents) > _MAX_EXTENTS:
        raise InvalidPackError(f"it has no list of at most {_MAX_EXTENTS} extents")
    if not isinstance(layers, list) or len(layers) > MAX_LAYERS:
        raise InvalidPackError(f"it has no list of at most {MAX_LAYERS} layers")
    if not isinstance(sources, list) or len(sources) > MAX_LAYERS:
        raise InvalidPackError(f"it has no list of at most {MAX_LAYERS} sources")
    return PackHeader(
        extents=tuple(map(_parse_extent, extents)),
        layers=tuple(map(_parse_layer, layers)),
        sources=tuple(map(_parse_source, sources)),
        **keys,
    )


def _parse_extent(value: object) -> tuple[int, int]:
    match value:
        case [int(offset), int(length)] if type(offset) is type(length) is int:
            return offset, length
    raise InvalidPackError(f"{str(value)[:100]!r} is no extent")


def _parse_layer(value: object) -> Layer:
    match value:
        case {
            "chain_id": str(chain_id),
            "diff_id": str() | None as diff_id,
            "subvolume": int(subvolume),
            **rest,
        } if (
            not rest and type(subvolume) is int
        ):
            return Layer(chain_id=chain_id, diff_id=diff_id, subvolume=subvolume)
    raise InvalidPackError(f"{str(value)[:100]!r} is no layer")


def _parse_source(value: object) -> LayerSource:
    types = LayerSource.__annotations__
    if isinstance(value, dict) and value.keys() == types.keys():
        if all(type(value[key]).__name__ == kind for key, kind in types.items()):
            return LayerSource(**value)
    raise InvalidPackError(f"{str(value)[:100]!r} is no source")


def stored_extents(file: FileIO, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the (offset, length) of the blocks of a sparse file that are not zeroes.
    They do not depend on which of the zeroes are holes."""
    fd = file.fileno()
    start = end = 0  # of the extent that is being collected
    position = 0
    while position < size_bytes:
        try:
            position = os.lseek(fd, position, os.SEEK_DATA)
        except OSError:  # ENXIO: there is no more
            break
        position -= position % BLOCK_BYTES
        hole = min(os.lseek(fd, position, os.SEEK_HOLE), size_bytes)
        while position < hole:
            for block in _blocks(os.pread(fd, _COPY_BYTES, position)):
                if block.strip(b"\0") and position < size_bytes:
                    if position != end:
                        if end > start:
                            yield start, end - start
                        start = position
                    end = position + BLOCK_BYTES
                position += BLOCK_BYTES
    if end > start:
        yield start, end - start


def _blocks(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), BLOCK_BYTES):
        yield data[at : at + BLOCK_BYTES]


def index_path(directory: Path, number: int) -> Path:
    """Return where unpack() puts the index of a source."""
    return directory / f"index.{number}"


def selection_path(directory: Path, number: int) -> Path:
    return directory / f"selection.{number}"


def write_pack(
    out: IO[bytes],
    header: PackHeader,
    seed_image: Path,
    digests: bytes,
    parts: Sequence[Path] = (),
) -> None:
    """Write the pack of an image whose local part is ``seed_image``; the header has the
    extents. ``parts`` are the index and the selection of each source. The same input
    makes the same bytes. Raises OSError."""
    if len(digests) != header._digest_bytes:
        raise InvalidPackError(f"it would have {len(digests)} bytes of digests")
    size_bytes = sum(length for _, length in header.extents)
    # NB: no threads, since their number would change the bytes.
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL if size_bytes <= _LARGE_BYTES else _LEVEL_OF_LARGE,
        window_log=_WINDOW_LOG,
        enable_ldm=True,
        write_checksum=True,
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with (
        open(seed_image, "rb") as seed,
        compressor.stream_writer(out, closefd=False) as packed,
    ):
        packed.write(MAGIC)
        packed.write(header.to_line())
        for offset, length in header.extents:
            seed.seek(offset)
            while length:
                part = seed.read(min(length, _COPY_BYTES))
                if not part:
                    raise InvalidPackError(f"{seed_image} ends at {seed.tell()}")
                packed.write(part)
                length -= len(part)
        packed.write(digests)
        for path in parts:
            with open(path, "rb") as file:
                while part := file.read(_COPY_BYTES):
                    packed.write(part)


class _Reader:
    """Reads exactly what is asked for from a pack."""

    def __init__(self, file: IO[bytes]) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
        raw: Any = decompressor.stream_reader(file, closefd=False)
        self._stream = io.BufferedReader(raw, _COPY_BYTES)

    def read(self, size_bytes: int) -> bytes:
        with _decompressing():
            data = self._stream.read(size_bytes)
        if len(data) != size_bytes:
            raise InvalidPackError("it ends too early")
        return data

    def line(self) -> bytes:
        with _decompressing():
            line = self._stream.readline(_MAX_HEADER_BYTES)
        if not line.endswith(b"\n"):
            raise InvalidPackError(
                f"its header has no end within {_MAX_HEADER_BYTES} bytes"
            )
        return line

    def finish(self) -> None:
        """Raise InvalidPackError when anything follows."""
        with _decompressing():
            rest = self._stream.read(1)
        if rest:
            raise InvalidPackError("something follows what its header tells of")


@contextmanager
def _decompressing() -> Iterator[None]:
    try:
        yield
    except (zstandard.ZstdError, MemoryError) as error:
        raise InvalidPackError(f"it is no valid zstd: {error}") from error


@contextmanager
def opened_pack(path: Path) -> Iterator[tuple[PackHeader, _Reader]]:
    """Open a pack whose digest was verified. Raises InvalidPackError, OSError."""
    with open(path, "rb") as file:
        reader = _Reader(file)
        if (magic := reader.read(len(MAGIC))) != MAGIC:
            if other := _ANY_VERSION.fullmatch(magic):
                raise InvalidPackError(
                    f"it has version {int(other[1])} of its format, and this "
                    "btrfs-ublk reads version 1",
                    hint="use the btrfs-ublk that made the image, or a newer one",
                )
            raise InvalidPackError("it does not begin as one")
        yield _parse_header(reader.line()), reader


def read_header(path: Path) -> PackHeader:
    """Read what a pack says of its image. Raises InvalidPackError, OSError."""
    with opened_pack(path) as (header, _):
        return header


def unpack(
    path: Path, seed_image: Path, *, check: Callable[[PackHeader], object] | None = None
) -> tuple[PackHeader, Digests]:
    """Write the local part of an image into a new sparse file; return the header and
    the units' digests, which were verified against the root. Of an indexed image,
    indexes and selections are written beside it: index_path(), selection_path().

    With ``check``, which gets the header first, the file is there, empty. Raises
    InvalidPackError and OSError; what was written of the file stays then, for the
    caller to remove with its directory.
    """
    with opened_pack(path) as (header, reader):
        if check is not None:
            check(header)
        _check_room(header, seed_image.parent)
        with open(seed_image, "xb" if check is None else "r+b") as seed:
            seed.truncate(header.local_bytes)
            for offset, length in header.extents:
                seed.seek(offset)
                while length:
                    part = reader.read(min(length, _COPY_BYTES))
                    seed.write(part)
                    length -= len(part)
        digests = _take_digests(header, reader)
        _take_indexes(header, reader, seed_image.parent)
        reader.finish()
    return header, digests


def _take_indexes(header: PackHeader, reader: _Reader, directory: Path) -> None:
    for number, source in enumerate(header.sources):
        for place, length in (
            (index_path(directory, number), source.index_bytes),
            (selection_path(directory, number), source.selection_bytes),
        ):
            with open(place, "xb") as file:
                while length:
                    part = reader.read(min(length, _COPY_BYTES))
                    file.write(part)
                    length -= len(part)


def _take_digests(header: PackHeader, reader: _Reader) -> Digests:
    units = reader.read(header._digest_bytes)
    digests = Digests(header.data_bytes, header.unit, units)
    if digests.root != header.root:
        raise InvalidPackError(
            f"its digests have the root {digests.root}, and it says {header.root}"
        )
    return digests


def check_data(header: PackHeader, data_bytes: int, *, indexed: bool = False) -> None:
    """Raise InvalidPackError when a manifest says that the data object has another
    size than the pack, whose digests it could then not meet; or that there is none
    (``indexed``), while the pack does not say where the data are, or the other way
    round."""
    if indexed != bool(header.sources) and header.data_bytes:
        raise InvalidPackError(
            "it is that of a sealed image, and the manifest that of an indexed one"
            if indexed
            else "it is that of an indexed image, and the manifest of a sealed one"
        )
    if not indexed and header.data_bytes != data_bytes:
        raise InvalidPackError(
            f"it tells of {header.data_bytes} bytes of data, and the manifest of "
            f"{data_bytes}"
        )


def _check_room(header: PackHeader, directory: Path) -> None:
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    if header.unpacked_bytes > MAX_METADATA_BYTES:
        raise InvalidPackError(
            f"it unpacks to {header.unpacked_bytes} bytes, more than "
            f"{MAX_METADATA_BYTES}"
        )
    if header.unpacked_bytes > free_bytes // 4:
        raise BtrfsUblkError(
            f"the metadata of the image have {header.unpacked_bytes} bytes, more than "
            f"a quarter of what is free below {directory}",
            hint="make room there, or name another directory (`image check`: "
            "--directory; others: --base)",
        )


def header_of(
    seed_image: Path,
    digests: Digests,
    *,
    device_bytes: int,
    fsid: str,
    layers: Sequence[Layer],
    config: dict[str, Any],
    first_bytes: int = 0,
    sources: Sequence[LayerSource] = (),
) -> PackHeader:
    """Return the header for the pack of an image that was just made."""
    with open(seed_image, "rb", buffering=0) as file:
        local_bytes = os.fstat(file.fileno()).st_size
        extents = tuple(stored_extents(file, local_bytes))
    return PackHeader(
        local_bytes=local_bytes,
        device_bytes=device_bytes,
        data_bytes=digests.size_bytes,
        extents=extents,
        unit=digests.unit_bytes,
        root=digests.root,
        fsid=fsid,
        first_bytes=first_bytes,
        layers=tuple(layers),
        config=config,
        sources=tuple(sources),
    )
