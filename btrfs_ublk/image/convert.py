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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from btrfs_ublk import __version__
from btrfs_ublk.base.private_dirs import make_private
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.content.oci import machine_platform
from btrfs_ublk.device.locks import lock_file
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.connection import RegistryAccess, is_loopback
from btrfs_ublk.image.diff import check_layers
from btrfs_ublk.image.documents import Descriptor, descriptors, parse_document
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pull import open_sealed
from btrfs_ublk.image.reference import LayoutName, Reference
from btrfs_ublk.image.registry import Repository
from btrfs_ublk.image.transfer import Pushed, push_image, walk

_DIRECTORY = "btrfs-ublk-convert"
#: Tags of the layout: what was made, what it was made of, and what was compared.
_MADE, _ORDINARY, _CHECKED = "made", "ordinary", "checked"
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
    ``target``, whose tag changes last.

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
    if access.insecure and not any(is_loopback(f"http://{x}/") for x in registries):
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
    with Repository(source, access.of(source.registry)) as repository:
        # NB: a tag may move while this lasts, or until a killed conversion goes on.
        pinned = source.at(repository.document(source.version).digest)
    with Repository(target, access.of(target.registry), writing=True) as repository:
        repository.has_document(target.version)  # a login that fails does so now
    base = make_private(
        (work or Path("/var/tmp")) / f"{_DIRECTORY}-{os.geteuid()}",
        what="directory of conversions",
        hint="choose another one with --work",
    )
    system = platform or "/".join(machine_platform())
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
        with Repository(target, access.of(target.registry), writing=True) as repository:
            pushed = push_image(
                layout,
                one,
                target,
                repository,
                mount_from=mount_from,
                progress=count,
            )
    return ConvertedImage(
        source=pinned, digest=one.digest, sealed=manifest.digest, pushed=pushed
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
