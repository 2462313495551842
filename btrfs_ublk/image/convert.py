"""From an image of a registry to an image of a registry that has the sealed one as
well: fetched, made, checked and stored by one call, which a killed one makes shorter.

    WORK/btrfs-ublk-convert-UID/HEX       a conversion: its source, options and version
    WORK/btrfs-ublk-convert-UID/HEX.lock  held by the process that is at it

All of a conversion is in an image layout, whose tags say how far it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from btrfs_ublk import __version__
from btrfs_ublk.base.private_dirs import make_private
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.content.platforms import machine_platform, platform_of
from btrfs_ublk.device.locks import lock_file
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess, RegistryError, on_loopback
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.documents import (
    MANIFESTS,
    Descriptor,
    blobs_of,
    describe,
    descriptors,
    is_index,
    parse_document,
    platform_in,
    sealed_in,
    to_bytes,
)
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pull import open_sealed
from btrfs_ublk.image.reference import LayoutName, Reference
from btrfs_ublk.image.repository import Repository
from btrfs_ublk.image.source import read_config
from btrfs_ublk.image.transfer import Pushed, open_repository, push_image, walk
from btrfs_ublk.image.tree import check_layers

_DIRECTORY = "btrfs-ublk-convert"
#: Tags of the layout: what was made, what it was made of, and what was compared.
_MADE, _ORDINARY, _CHECKED = "made", "ordinary", "checked"
#: Annotation of an attestation in an index: the digest of the image that it is about.
_ATTESTED = "vnd.docker.reference.digest"
_NO_PLATFORM = platform_of({})
#: Nobody goes on with a conversion that was killed as long ago as this.
_STALE_S = 7 * 86400.0

Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class ConvertedImage:
    """``source`` is what was converted, with the digest that its tag had. ``digest`` is
    that of the new index, and ``sealed`` that of the sealed image's manifest."""

    source: Reference
    digest: str
    sealed: str
    pushed: Pushed


def convert_image(
    source: Reference,
    target: Reference,
    options: BuildOptions,
    access: RegistryAccess,
    *,
    work: Path | None = None,
    platform: str | None = None,
    check: bool = False,
    mount_from: str | None = None,
    expect: Progress = lambda total: None,
    progress: Progress = lambda count: None,
    say: Callable[[str], object] = lambda text: None,
) -> ConvertedImage:
    """Make a sealed image of ``source``, and store it with the ordinary one as
    ``target``, whose tag changes last. Images of other platforms that this tag has, or
    the source in the same repository, stay in the index.

    ``work`` is a directory for what is not stored yet; that is removed at the end, and
    kept by a failure, so that the next call goes on. With ``check``, each layer is read
    back and compared before. Blobs that the target's registry has, also in the
    repository ``mount_from`` or that of the source, are not sent. Raises UsageError,
    RegistryError, InvalidImageError, CommandError.
    """
    if target.digest is not None:
        raise UsageError(
            f"{target} has a digest, which follows from the content",
            hint="name a tag: REGISTRY/REPOSITORY:TAG",
        )
    registries = {source.registry, target.registry}
    if access.insecure and not any(map(on_loopback, registries)):
        raise UsageError(
            "--insecure is for registries on loopback, not for "
            f"{' and '.join(sorted(registries))}",
            hint="--ca-file names a certificate of your own to trust",
        )
    done = 0

    def count(amount: int) -> None:
        nonlocal done
        done += amount
        progress(amount)

    say(f"look at {source}")
    with open_repository(source, access.of(source.registry)) as repository:
        # NB: a tag may move while this lasts, or until a killed conversion goes on.
        pinned = source.at(repository.document(source.version).digest)
    with open_repository(
        target, access.of(target.registry), writing=True
    ) as repository:
        repository.has_document(target.version)  # a login that fails does so now
    base = make_private(
        (work or Path("/var/tmp")) / f"{_DIRECTORY}-{os.geteuid()}",
        what="directory of conversions",
        hint="choose another one with --work",
    )
    system = platform or str(machine_platform())
    with _conversion(base, pinned, system, options) as directory:
        layout, one = _made(
            directory,
            pinned,
            options,
            access.of(source.registry),
            platform=platform,
            check=check,
            progress=count,
            say=say,
        )
        _, manifest, _ = open_sealed(LayoutName(layout.path, _MADE))
        if mount_from is None and source.registry == target.registry:
            mount_from = source.repository
        if mount_from == target.repository:
            mount_from = None
        say(f"push {target}")
        blobs = [each.size for each, data in walk(layout, one) if data is None]
        expect(done + sum(blobs))
        with open_repository(
            target, access.of(target.registry), writing=True
        ) as repository:
            pushed = push_image(
                layout,
                one,
                target,
                repository,
                mount_from=mount_from,
                tagged=lambda index: _merged(index, pinned, target, repository),
                progress=count,
            )
    return ConvertedImage(
        source=pinned, digest=pushed.digest, sealed=manifest.digest, pushed=pushed
    )


def _made(
    directory: Path,
    source: Reference,
    options: BuildOptions,
    access: RegistryAccess,
    *,
    platform: str | None,
    check: bool,
    progress: Progress,
    say: Callable[[str], object],
) -> tuple[Layout, Descriptor]:
    """Return the layout, and the new index in it, which may be there already."""
    path = directory / "layout"
    layout = Layout(path)
    one = layout.tagged(_MADE)
    name = LayoutName(path, _MADE)
    if one is None:
        say(f"fetch {source}")
        build_image(
            source,
            path,
            options,
            tag=_MADE,
            platform=platform,
            access=access,
            progress=progress,
            say=say,
        )
        one = layout.find(_MADE)
    if check and layout.tagged(_CHECKED) is None:
        say("check the layers")
        index = parse_document(layout.read(one), str(name))
        layout.tag(descriptors(index, "manifests", str(name))[0], _ORDINARY)
        ordinary = LayoutName(path, _ORDINARY)
        check_layers(name, ordinary, access, directory=directory)
        layout.tag(one, _CHECKED)
    return layout, one


def _merged(
    index: bytes, source: Reference, target: Reference, repository: Repository
) -> bytes:
    """Return a new index with what the target's tag has for other platforms; a tag that
    is new gets what the source has for them, if that is in the same repository."""
    where, new = str(target), parse_document(index, str(target))
    try:
        document = repository.document(target.version)
    except RegistryError as error:
        if error.status != 404:
            raise
        if source.place != target.place:
            return index
        document = repository.document(source.version)
    before = parse_document(document.data, where)
    if is_index(before):
        there = descriptors(before, "manifests", where)
    else:
        there = [describe(document.media_type, document.data)]
    there = [_with_platform(one, repository) for one in there]
    ordinary, sealed = descriptors(new, "manifests", where)
    ours = platform_of(ordinary.platform)
    if not is_index(before) and platform_of(there[0].platform) in (ours, _NO_PLATFORM):
        return index
    gone = {one.digest for one in there if platform_of(one.platform) == ours}
    stale = {sealed.digest}
    for digest in gone:
        stale |= sealed_in(parse_document(repository.document(digest).data, digest))
    # NB: what is new has the place of the old one, so that a conversion of what was
    # converted makes the same index.
    made: list[Mapping[str, Any]] = []
    for one in there:
        if one.annotations.get(_ATTESTED) in gone:
            continue
        put = ordinary if one.digest in gone else sealed if one.digest in stale else one
        made += [put.raw] if put.raw not in made else []
    made += [one.raw for one in (ordinary, sealed) if one.raw not in made]
    return to_bytes({**new, "manifests": made})


def _with_platform(one: Descriptor, repository: Repository) -> Descriptor:
    """Have an ordinary image tell its platform, which its config knows at least."""
    if one.platform or one.is_sealed or one.media_type not in MANIFESTS:
        return one
    manifest = parse_document(repository.document(one.digest).data, one.digest)
    if "artifactType" in manifest:
        return one
    blob, *_ = blobs_of(manifest, one.digest)
    config, _ = read_config(repository.get_blob(blob), one.digest)
    return replace(one, raw={**one.raw, "platform": platform_in(config)})


@contextmanager
def _conversion(
    base: Path, source: Reference, platform: str, options: BuildOptions
) -> Iterator[Path]:
    """Yield the directory of a conversion, perhaps with what a killed one has left in
    it. It stays after an error."""
    about: dict[str, Any] = {
        "source": str(source),
        "platform": platform,
        "version": __version__,
        "time": os.environ.get("SOURCE_DATE_EPOCH"),
        **asdict(replace(options, threads=None)),
    }
    text = json.dumps(about, sort_keys=True).encode()
    directory = base / hashlib.sha256(text).hexdigest()[:16]
    _remove_stale(base, directory)
    lock = lock_file(directory.with_suffix(".lock"))
    if lock is None:
        raise BtrfsUblkError(
            f"another command converts {source} in {base}",
            hint="wait for it, or choose another directory with --work",
        )
    with lock:
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            os.utime(directory.with_suffix(".lock"))
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot make {directory}: {error.strerror}",
                hint="choose another directory with --work",
            ) from error
        try:
            yield directory
        except BaseException:
            if not any(directory.iterdir()):
                _remove(directory)
            raise
        _remove(directory)


def _remove(directory: Path) -> None:
    """Remove a conversion, whose lock is held."""
    with deferred():
        shutil.rmtree(directory, ignore_errors=True)
        directory.with_suffix(".lock").unlink(missing_ok=True)
        with suppress(OSError):  # it has other conversions
            directory.parent.rmdir()


def _remove_stale(base: Path, ours: Path) -> None:
    for path in base.glob("*.lock"):
        directory = path.with_suffix("")
        with suppress(OSError):
            if directory == ours or time.time() - path.stat().st_mtime < _STALE_S:
                continue
            if (lock := lock_file(path)) is not None:
                with lock:
                    _remove(directory)
