"""Making sealed images: an OCI image layout with the ordinary image, if there is one,
and the sealed one beside it (docs/design/images.md)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from btrfs_ublk.base.helpers import MKIMAGE, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.content.digests import DEFAULT_UNIT_BYTES, Digests, check_unit
from btrfs_ublk.errors import BtrfsUblkError, UsageError, error_of_status
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.documents import (
    ARTIFACT,
    DATA,
    EMPTY,
    EMPTY_BYTES,
    INDEX,
    MANIFEST,
    METADATA,
    NO_PLATFORM,
    SEALED_IN,
    TRACE,
    Descriptor,
    Start,
    embedding,
    to_bytes,
    write_sealed_manifest,
)
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pack import Layer, header_of, write_pack
from btrfs_ublk.image.reference import (
    DEFAULT_TAG,
    LayoutName,
    Name,
    Reference,
    check_tag,
)
from btrfs_ublk.image.source import OpenedSource, open_source
from btrfs_ublk.image.start.bounded import bounded_ranges
from btrfs_ublk.image.start.programs import Range

#: A bound for what would otherwise wait for ever.
_TIMEOUT_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How an image is made. None: mkimage's default."""

    compression: str | None = None
    max_inline: int | None = None
    checksum: str | None = None
    threads: int | None = None
    unit_bytes: int = DEFAULT_UNIT_BYTES
    #: What comes first in the data object: (path, offset, length), of files. None:
    #: what the image's command reads before it does its own work, as far as that can
    #: be told from its layers.
    first: Sequence[tuple[str, int, int]] | None = None

    def __post_init__(self) -> None:
        check_unit(self.unit_bytes)


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image that was made. ``digest`` is that of the index, ``sealed`` that of the
    sealed image's manifest."""

    name: LayoutName
    digest: str
    sealed: str
    fsid: str
    layers: int
    pack_bytes: int
    metadata_bytes: int
    data_bytes: int
    first_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"name": str(self.name)}


def open_output(output: Path) -> Layout:
    """Return the layout for a new image, which is made if missing. Raises UsageError
    for a path that no name of an image can have."""
    if ":" in str(output):
        raise UsageError(
            f"layout {str(output)!r} could not be named: in oci:DIRECTORY:TAG, the "
            "first colon ends the directory",
            hint="choose a directory without colons; --tag TAG names the image",
        )
    return Layout.made(output)


def build_image(
    source: Name | Path,
    output: Path,
    options: BuildOptions,
    *,
    tag: str | None = None,
    platform: str | None = None,
    access: RegistryAccess | None = None,
    check: Callable[[LayoutName], object] = lambda name: None,
    progress: Callable[[int], object] = lambda count: None,
    say: Callable[[str], object] = lambda text: None,
) -> BuiltImage:
    """Make a sealed image in a layout ``output``, which is made if missing, by the name
    ``tag`` (the source's, else ``latest``). Raises UsageError, RegistryError,
    InvalidImageError, CommandError; no name is given to what is not complete. When
    ``check`` raises, the image loses its name, which one that had it before gets back.
    """
    helper_path(MKIMAGE)
    is_traced = bool(options.first)
    if tag is None:
        given = source.tag if isinstance(source, (Reference, LayoutName)) else None
        tag = given or DEFAULT_TAG
    check_tag(tag)
    layout = open_output(output)
    try:
        opened = open_source(
            source,
            layout,
            access or RegistryAccess(),
            platform=platform,
            progress=progress,
        )
        with layout.scratch() as work:
            if options.first is None:
                say("see what its command reads")
                options = replace(options, first=_derived(opened, work))
            say("make the file system")
            report = make_image(opened, work / "image", options)
            say("pack the metadata")
            before = layout.tagged(tag)
            made = seal(
                *(layout, work / "image", report, opened, tag), traced=is_traced
            )
        try:
            check(made.name)
        except BaseException:
            with deferred():
                layout.tag(before, tag)
            raise
        return made
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot make an image in {output}: {error.strerror or error}",
            hint="is its disk full, or read-only?",
        ) from error
    finally:
        layout.remove_if_empty()


def _derived(opened: OpenedSource, work: Path) -> list[Range]:
    layers = [layer.path for layer in opened.layers if layer.kind == "tar"]
    return bounded_ranges(layers, opened.config, work)


def make_image(
    opened: OpenedSource,
    output: Path,
    options: BuildOptions,
    *,
    in_layers: bool = False,
) -> dict[str, Any]:
    """Have mkimage make an image in a new directory; return what it reports. With
    ``in_layers``, data stay where they are. Raises UsageError, CommandError, OSError.
    """
    output.mkdir(mode=0o700)
    description: dict[str, Any] = {
        "layers": [layer.to_dict() for layer in opened.layers],
        "output": str(output),
        "unit": options.unit_bytes,
        "first": list(options.first or ()),
    }
    if in_layers:
        del description["first"]
        description |= {"in_layers": True, "compression": "none"}
    for key in ("compression", "max_inline", "checksum", "threads"):
        value = getattr(options, key)
        if value is not None:
            description[key] = value
    if (epoch := source_date_epoch()) is not None:
        description["time"] = epoch
    answer = run(
        [helper_path(MKIMAGE)],
        input=json.dumps(description),
        timeout_s=_TIMEOUT_S,
        ok_statuses=(0, 1, 2),
    )
    if answer.returncode != 0:
        words = answer.stderr.strip().partition(": error: ")[2] or answer.stderr
        raise error_of_status(answer.returncode)(words)
    report: dict[str, Any] = json.loads(answer.stdout)
    return report | {"unit": options.unit_bytes}


def source_date_epoch() -> int | None:
    """Return the time of all that is made, if the user gives one. Raises UsageError."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is None:
        return None
    if not re.fullmatch("[0-9]{1,18}", epoch):
        raise UsageError(
            f"SOURCE_DATE_EPOCH is {epoch!r}, no number of seconds",
            hint="unset it, or: SOURCE_DATE_EPOCH=$(date +%s)",
        )
    return int(epoch)


def seal(
    layout: Layout,
    made: Path,
    report: dict[str, Any],
    opened: OpenedSource,
    tag: str,
    *,
    traced: bool = False,
) -> BuiltImage:
    """Add to a layout what mkimage has made in the directory ``made``, and told in its
    report, with the ordinary image that is there; then name that. Raises OSError."""
    digests = Digests(
        (made / "data").stat().st_size, report["unit"], (made / "digests").read_bytes()
    )
    header = header_of(
        made / "seed.img",
        digests,
        device_bytes=report["device_bytes"],
        fsid=report["fsid"],
        first_bytes=report["counts"]["first_bytes"],
        layers=layers_of(report["layers"]),
        config=dict(opened.config),
    )
    with layout.adding(METADATA) as (file, done):
        write_pack(file, header, made / "seed.img", digests.units)
    pack = done[0]
    data = layout.take(made / "data", DATA) if digests.size_bytes else None
    layout.add(EMPTY, EMPTY_BYTES)
    start = Start(
        local_bytes=header.local_bytes,
        device_bytes=header.device_bytes,
        data_bytes=header.data_bytes,
        first_bytes=header.first_bytes,
        unit=header.unit,
        fsid=header.fsid,
        digests=digests.units,
    )
    annotations = start.to_annotations() | ({TRACE: "first"} if traced else {})
    manifest = write_sealed_manifest(pack, data, annotations=annotations)
    sealed = layout.add(MANIFEST, manifest, artifactType=ARTIFACT, platform=NO_PLATFORM)
    index = layout.add(INDEX, _index(layout, opened, sealed, manifest))
    layout.tag(index, tag)
    return BuiltImage(
        name=LayoutName(layout.path, tag),
        digest=index.digest,
        sealed=sealed.digest,
        fsid=header.fsid,
        layers=len(header.layers),
        pack_bytes=pack.size,
        metadata_bytes=sum(length for _, length in header.extents),
        data_bytes=header.data_bytes,
        first_bytes=header.first_bytes,
    )


def layers_of(reported: Sequence[dict[str, Any]]) -> list[Layer]:
    """Return the layers that mkimage has told of."""
    return [
        Layer(
            chain_id=each["chain_id"],
            diff_id=each.get("diff_id"),
            subvolume=each["subvolume"],
        )
        for each in reported
    ]


def _index(
    layout: Layout, opened: OpenedSource, sealed: Descriptor, manifest: bytes
) -> bytes:
    """Return the index: the ordinary image first, whose layers say where they are
    sealed, and the sealed one second, with its manifest, which saves a request."""
    manifests = [dict(embedding(sealed, manifest))]
    if opened.ordinary is not None and opened.manifest is not None:
        layers = [
            {
                **layer,
                "annotations": {
                    **(layer.get("annotations") or {}),
                    SEALED_IN: sealed.digest,
                },
            }
            for layer in opened.manifest["layers"] or ()
        ]
        document = {**opened.manifest, "layers": layers}
        annotated = layout.add(opened.ordinary.media_type, to_bytes(document))
        platform = dict(opened.ordinary.platform)
        manifests.insert(
            0, {**annotated.raw, **({"platform": platform} if platform else {})}
        )
    return to_bytes({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests})
