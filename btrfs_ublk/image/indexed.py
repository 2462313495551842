"""Indexed images: the metadata of a sealed one, whose data stay in the layers of an
ordinary image (docs/design/images.md, "Images that stay as they are")."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from btrfs_ublk.base.helpers import CODEC, MKIMAGE, helper_path
from btrfs_ublk.base.process import spawn
from btrfs_ublk.content.digests import Digests
from btrfs_ublk.content.index import make_index
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import (
    BuildOptions,
    layers_of,
    make_image,
    open_output,
    source_date_epoch,
)
from btrfs_ublk.image.documents import (
    CREATED,
    EMPTY,
    EMPTY_BYTES,
    FIRST,
    INDEXED,
    MANIFEST,
    METADATA,
    NO_BYTES,
    Descriptor,
    InvalidImageError,
    describe_blob,
    descriptors,
    write_sealed_manifest,
)
from btrfs_ublk.image.extents import units_of_ranges
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pack import (
    LayerSource,
    PackHeader,
    header_of,
    index_path,
    selection_path,
    write_pack,
)
from btrfs_ublk.image.reference import DEFAULT_TAG, LayoutName, Name, check_tag
from btrfs_ublk.image.source import OpenedSource, open_source
from btrfs_ublk.image.start.bounded import bounded_ranges
from btrfs_ublk.image.start.programs import Range
from btrfs_ublk.image.traces import fitting, write_trace
from btrfs_ublk.units import MIB

_INSTEAD_HINT = (
    "btrfs-ublk image build makes a sealed image of it, with data of its own"
)
#: How far apart points are: what comes before a unit is decoded for nothing.
_SPACINGS_BYTES = (MIB, 2 * MIB, 4 * MIB)
_TIMEOUT_S = 86400.0
_COPY_BYTES = MIB


@dataclass(frozen=True, kw_only=True)
class IndexedImage:
    """An index that was made. ``digest`` is that of its manifest, ``subject`` that of
    the ordinary image's. ``index_bytes`` are those of the indexes and selections,
    unpacked; ``layer_bytes`` those of the layers."""

    name: LayoutName
    digest: str
    subject: str
    fsid: str
    layers: int
    pack_bytes: int
    metadata_bytes: int
    index_bytes: int
    layer_bytes: int
    data_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"name": str(self.name)}


def index_image(
    source: Name,
    output: Path,
    options: BuildOptions,
    *,
    tag: str | None = None,
    platform: str | None = None,
    access: RegistryAccess | None = None,
    progress: Callable[[int], object] = lambda count: None,
    say: Callable[[str], object] = lambda text: None,
) -> IndexedImage:
    """Make an indexed image of an ordinary one, in a layout ``output``, which is made
    if missing, by the name ``tag`` (the source's, else ``latest``). The layers are
    read, and not kept. Raises UsageError, RegistryError, InvalidImageError,
    BtrfsUblkError; no name is given to what is not complete."""
    helper_path(MKIMAGE)
    tag = check_tag(tag or source.tag or DEFAULT_TAG)
    layout = open_output(output)
    try:
        _check_tag_is_free(layout, tag)
        with layout.scratch() as work:
            # The layers go with it.
            opened = open_source(
                source,
                Layout.made(work / "layers"),
                access or RegistryAccess(),
                platform=platform,
                progress=progress,
            )
            assert opened.ordinary is not None and opened.manifest is not None
            layers = descriptors(opened.manifest, "layers", str(source))
            codecs = [codec_of(each, source) for each in layers]
            say("see what its command reads")
            paths = [layer.path for layer in opened.layers]
            first = bounded_ranges(paths, opened.config, work)
            say("index the layers")
            report = _index_layers(opened, layers, codecs, work, options)
            say("pack the metadata")
            return _seal(layout, work, report, opened, layers, codecs, tag, first)
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot make an image in {output}: {error.strerror or error}",
            hint="is its disk full, or read-only?",
        ) from error
    finally:
        layout.remove_if_empty()


def _check_tag_is_free(layout: Layout, tag: str) -> None:
    before = layout.tagged(tag)
    if before is not None and before.raw.get("artifactType") != INDEXED:
        raise UsageError(
            f"{LayoutName(layout.path, tag)} is another image, which would lose its "
            "name",
            hint="choose another name with --tag",
        )


def codec_of(layer: Descriptor, where: object) -> str:
    """Return how a layer is compressed. Raises UsageError for one that cannot be read
    at any place."""
    codec = layer.codec
    if not codec:
        raise UsageError(
            f"layer {layer.digest} of {where} is of the type {layer.media_type!r}: "
            "only those that are compressed by gzip or zstd can stay as they are",
            hint=_INSTEAD_HINT,
        )
    return codec


def _index_layers(
    opened: OpenedSource,
    layers: list[Descriptor],
    codecs: list[str],
    work: Path,
    options: BuildOptions,
) -> dict[str, Any]:
    """Make the metadata and selections, in ``image`` of the directory ``work``, and
    meanwhile the indexes of the layers, in ``work``."""
    paths = [layer.path for layer in opened.layers]

    def index(number: int) -> None:
        try:
            _index_layer(paths[number], index_path(work, number), codecs[number])
        except BtrfsUblkError as error:
            what = error.message.replace(f"'{paths[number]}'", "it")
            raise BtrfsUblkError(
                f"layer {layers[number].digest} cannot be indexed: {what}",
                hint=_INSTEAD_HINT,
            ) from error

    with ThreadPoolExecutor(1) as pool:
        indexes = [
            pool.submit(index, number)
            for number in range(len(layers))
            if opened.layers[number].diff_id != NO_BYTES
        ]
        try:
            report = make_image(opened, work / "image", options, in_layers=True)
        except BaseException:
            for one in indexes:
                one.cancel()
            raise
        for one in indexes:
            one.result()
    return report


def _index_layer(path: Path, output: Path, codec: str) -> None:
    """Make an index with as many points as 1 % of the layer takes, and no fewer than
    ``_SPACINGS_BYTES`` have; of zstd, the frames are the points."""
    for spacing_bytes in _SPACINGS_BYTES:
        made = make_index(path, output, codec=codec, spacing_bytes=spacing_bytes)
        if codec != "gzip" or made.index_size * 100 <= made.coded_size:
            break


def _seal(
    layout: Layout,
    work: Path,
    report: dict[str, Any],
    opened: OpenedSource,
    layers: list[Descriptor],
    codecs: list[str],
    tag: str,
    first: Sequence[Range],
) -> IndexedImage:
    made = work / "image"
    digests = Digests(
        report["data_bytes"], report["unit"], (made / "digests").read_bytes()
    )
    sources, parts = [], []
    for number, told in enumerate(report["layers"]):
        if not told["data_bytes"]:
            continue  # All that it has is in the metadata.
        files = [index_path(work, number), selection_path(made, number)]
        sizes = [path.stat().st_size for path in files]
        parts += files
        sources.append(
            LayerSource(
                layer=layers[number].digest,
                layer_bytes=layers[number].size,
                codec=codecs[number],
                offset=told["data_offset"],
                data_bytes=told["data_bytes"],
                index_bytes=sizes[0],
                selection_bytes=sizes[1],
            )
        )
    header = header_of(
        made / "seed.img",
        digests,
        device_bytes=report["device_bytes"],
        fsid=report["fsid"],
        layers=layers_of(report["layers"]),
        config=dict(opened.config),
        sources=sources,
    )
    with layout.adding(METADATA) as (file, done):
        write_pack(file, header, made / "seed.img", digests.units, parts)
    pack = done[0]
    layout.add(EMPTY, EMPTY_BYTES)
    assert opened.ordinary is not None
    # NB: not the clock's time: the same image makes the same index.
    epoch = source_date_epoch()
    more: dict[str, Any] = {}
    if epoch is not None:
        with suppress(OverflowError, ValueError, OSError):  # no year of four digits
            created = datetime.fromtimestamp(epoch, timezone.utc).isoformat()
            more["annotations"] = {CREATED: created}
    subvolume = header.layers[-1].subvolume
    annotations = dict(more.get("annotations", {}))
    if first and (
        units := fitting(
            units_of_ranges(made / "seed.img", subvolume, first, header.unit)
        )
    ):
        annotations[FIRST] = write_trace(units)
    one = layout.add(
        MANIFEST,
        write_sealed_manifest(pack, None, opened.ordinary, annotations=annotations),
        artifactType=INDEXED,
        **more,
    )
    layout.tag(one, tag)
    return IndexedImage(
        name=LayoutName(layout.path, tag),
        digest=one.digest,
        subject=opened.ordinary.digest,
        fsid=header.fsid,
        layers=len(header.layers),
        pack_bytes=pack.size,
        metadata_bytes=sum(length for _, length in header.extents),
        index_bytes=sum(x.index_bytes + x.selection_bytes for x in sources),
        layer_bytes=sum(layer.size for layer in layers),
        data_bytes=header.data_bytes,
    )


def check_subject(
    header: PackHeader, subject: Mapping[str, Any], where: object
) -> None:
    """Raise InvalidImageError unless the data of an indexed image are in layers of its
    subject, whose manifest this is."""
    layers = {
        (one.digest, one.size, one.codec)
        for one in descriptors(subject, "layers", str(where))
    }
    for source in header.sources:
        if (source.layer, source.layer_bytes, source.codec) not in layers:
            raise InvalidImageError(
                f"the indexed image has data in layer {source.layer} "
                f"({source.layer_bytes} bytes, {source.codec}), and {where} has no "
                "such layer",
                hint="it is an index of another image: do not trust it",
            )


def layer_blob(source: LayerSource) -> Descriptor:
    return describe_blob("", source.layer, source.layer_bytes)


def data_parts(
    header: PackHeader, directory: Path, layer: Callable[[LayerSource], Path]
) -> Iterator[bytes]:
    """Yield all data of an indexed image that was unpacked in ``directory``; ``layer``
    gets a file, verified. Raises InvalidImageError."""
    for number, source in enumerate(header.sources):
        path = layer(source)
        argv: list[str | Path] = [helper_path(CODEC), "read"]
        argv += [index_path(directory, number), str(header.unit), path]
        argv.append(selection_path(directory, number))
        with spawn(argv, pipe_stdout=True) as child:
            assert child.stdout is not None
            with open(child.stdout.fileno(), "rb", closefd=False) as decoded:
                while part := decoded.read(_COPY_BYTES):
                    yield part
            if child.wait(_TIMEOUT_S) != 0:
                text = child.stderr_tail().strip().rpartition(": error: ")[2]
                raise InvalidImageError(
                    f"layer {source.layer}: " + text.replace(f"'{path}'", "it")
                )
