"""Reading the trees of sealed images without a mount: as a tar, or to compare two of
them, or one with what it was made of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote_to_bytes

from btrfs_ublk.base.capabilities import SparseFile, require
from btrfs_ublk.base.helpers import READIMAGE, helper_path
from btrfs_ublk.base.process import spawn
from btrfs_ublk.base.progress import SILENT, Task
from btrfs_ublk.content.digests import DIGEST_BYTES, Digests
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, make_image
from btrfs_ublk.image.check import assembled_image, putting_together
from btrfs_ublk.image.documents import DATA_OFFSET, InvalidImageError
from btrfs_ublk.image.extents import finished
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pack import Layer, PackHeader
from btrfs_ublk.image.reference import LayoutName, Name
from btrfs_ublk.image.source import OpenedSource, open_path, open_source
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.units import MIB

#: A bound for what would otherwise wait for ever.
_TIMEOUT_S = 86400.0
_COPY_BYTES = MIB


@dataclass(frozen=True)
class ExportReport:
    """What was exported. ``remark`` says what a tar could not hold."""

    chain_id: str
    tar_bytes: int
    remark: str | None = None


def export_image(
    name: Name,
    access: RegistryAccess,
    out: IO[bytes],
    *,
    layer: str | None = None,
    directory: Path | None = None,
    task: Task = SILENT,
) -> ExportReport:
    """Write a sealed image as a tar, after all of it was compared with its digests: the
    tree after the layer with the chain ID ``layer``, or after the last. Equal trees
    make equal bytes. No privileges are needed.

    The other arguments are those of check_image(). Raises InvalidImageError, what
    check_image() raises, and BtrfsUblkError when ``out`` cannot be written.
    """
    helper = helper_path(READIMAGE)
    with assembled_image(name, access, directory=directory, task=task) as image:
        task.say("write the tar")
        chosen = _layer(image.header, layer)
        return _write(helper, image.whole, chosen, out)


def _layer(header: PackHeader, chain_id: str | None) -> Layer:
    for layer in reversed(header.layers):
        if chain_id in (None, layer.chain_id):
            return layer
    raise UsageError(
        f"the image has no layer {chain_id!r}",
        hint="btrfs-ublk image inspect lists its layers",
    )


def _write(helper: Path, whole: Path, layer: Layer, out: IO[bytes]) -> ExportReport:
    tar_bytes = 0
    argv: list[str | Path] = [helper, "tar", str(layer.subvolume), whole]
    with spawn(argv, pipe_stdout=True) as child:
        assert child.stdout is not None
        while part := os.read(child.stdout.fileno(), _COPY_BYTES):
            tar_bytes += len(part)
            view = memoryview(part)
            try:
                while view:
                    view = view[out.write(view) :]
            except BrokenPipeError:
                raise  # a reader that has enough, as head(1), needs no message
            except OSError as error:
                raise BtrfsUblkError(
                    f"cannot write {out.name}: {error.strerror or error}"
                ) from error
        said = finished(child, whole)
    remark = said.partition(": warning: ")[2] or None
    return ExportReport(layer.chain_id, tar_bytes, remark)


#: The fields of a line (csrc/image/tree_list.h) behind the path.
_FIELDS = (
    *("type", "mode", "owner", "time", "size", "device", "target"),
    *("link", "attributes", "content"),
)
_TYPES = {
    "-": "file",
    "d": "directory",
    "l": "symbolic link",
    "c": "character device",
    "b": "block device",
    "p": "fifo",
    "s": "socket",
}
#: What differs in these is shown.
_SHOWN = ("type", "mode", "owner", "size", "device", "target", "link")
#: What the lines of further names of a file lack.
_OF_FIRST = ("attributes", "content")


@dataclass(frozen=True)
class Difference:
    """``change`` is "removed" (only the first tree has the path), "added", or
    "changed"; then ``fields`` has what differs, with both values."""

    path: str
    change: str
    fields: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        what = [
            f"{key} {a} -> {b}" if key in _SHOWN else key
            for key, (a, b) in self.fields.items()
        ]
        return f"{self.change} {self.path}" + (f": {', '.join(what)}" if what else "")

    def to_dict(self) -> dict[str, Any]:
        return {"path": self.path, "change": self.change, "fields": self.fields}


@dataclass(frozen=True)
class DiffReport:
    """How many entries differ. ``data_bytes`` are those of the second image, and
    ``new_bytes`` those of its units that the first one has not; None when one of both
    is a directory or a tar."""

    differences: int
    data_bytes: int | None = None
    new_bytes: int | None = None


@dataclass(frozen=True)
class _Tree:
    whole: Path
    subvolume: int
    digests: Digests | None


def diff_images(
    first: Name | Path,
    second: Name | Path,
    access: RegistryAccess,
    take: Callable[[Difference], object],
    *,
    directory: Path | None = None,
    task: Task = SILENT,
) -> DiffReport:
    """Compare two trees, those after the last layer of images, and have ``take`` take
    each difference, in the order of paths. A path is a directory or a tar.

    The other arguments and errors are those of export_image(), and for paths those of
    build_image().
    """
    helper = helper_path(READIMAGE)
    with ExitStack() as stack:
        trees = [
            stack.enter_context(_opened(one, access, directory, task))
            for one in (first, second)
        ]
        task.say("compare")
        count = 0
        for difference in _differences(helper, *trees):
            count += 1
            take(difference)
    old, new = (tree.digests for tree in trees)
    if old is None or new is None:
        return DiffReport(count)
    return DiffReport(count, new.size_bytes, new_bytes(old, new))


@contextmanager
def _opened(
    image: Name | Path, access: RegistryAccess, directory: Path | None, task: Task
) -> Iterator[_Tree]:
    if isinstance(image, Path):
        with _made(open_path(image), directory) as trees:
            yield trees[-1]
    else:
        with assembled_image(image, access, directory=directory, task=task) as found:
            yield _Tree(found.whole, found.header.layers[-1].subvolume, found.digests)


def check_layers(
    name: LayoutName,
    source: Name | Path,
    access: RegistryAccess,
    *,
    platform: str | None = None,
    directory: Path | None = None,
) -> int:
    """Compare the tree of each layer of a sealed image with what its source, whose
    layers are compared with their diff IDs, makes anew. So chain IDs are those of the
    content. Returns the number of layers; raises InvalidImageError with the first
    difference, and what diff_images() raises."""
    helper = helper_path(READIMAGE)
    with (
        assembled_image(name, access, directory=directory) as image,
        tempdir(parent=directory) as work,
    ):
        opened = open_source(
            source, Layout.made(work / "layout"), access, platform=platform
        )
        sealed = image.header.layers
        if not isinstance(source, Path):
            said = [(layer.chain_id, layer.diff_id) for layer in sealed]
            if said != [(layer.name, layer.diff_id) for layer in opened.layers]:
                raise InvalidImageError(
                    f"{name}: its chain IDs are not those of {source}"
                )
        with _made(opened, directory) as trees:
            for layer, tree in zip(sealed, trees, strict=True):
                found = _Tree(image.whole, layer.subvolume, None)
                for difference in _differences(helper, tree, found):
                    raise InvalidImageError(
                        f"{name}: layer {layer.chain_id} is not that of {source}: "
                        f"{difference}"
                    )
    return len(sealed)


@contextmanager
def _made(opened: OpenedSource, directory: Path | None) -> Iterator[list[_Tree]]:
    """Make an image, whose metadata need no pack, and yield the trees of its layers."""
    with ExitStack() as stack:
        with putting_together(directory):
            work = stack.enter_context(tempdir(parent=directory))
            require(SparseFile(work, DATA_OFFSET + MIB))
            report = make_image(
                opened, work / "image", BuildOptions(compression="none")
            )
            whole, data = work / "image" / "seed.img", work / "image" / "data"
            with open(whole, "r+b") as file, open(data, "rb") as content:
                file.truncate(DATA_OFFSET)
                file.seek(DATA_OFFSET)
                shutil.copyfileobj(content, file, _COPY_BYTES)
            os.unlink(data)
        yield [_Tree(whole, each["subvolume"], None) for each in report["layers"]]


@contextmanager
def _lines(helper: Path, tree: _Tree) -> Iterator[Iterator[bytes]]:
    """Yield what the helper prints of a tree. NB: all has to be read."""
    argv: list[str | Path] = [helper, "list", str(tree.subvolume), tree.whole]
    with spawn(argv, pipe_stdout=True) as child:
        assert child.stdout is not None
        with open(child.stdout.fileno(), "rb", _COPY_BYTES, closefd=False) as file:

            def lines() -> Iterator[bytes]:
                yield from file
                finished(child, tree.whole)

            yield lines()


def _differences(helper: Path, one: _Tree, other: _Tree) -> Iterator[Difference]:
    with _lines(helper, one) as left, _lines(helper, other) as right:
        yield from _compare(left, right)


def _compare(left: Iterator[bytes], right: Iterator[bytes]) -> Iterator[Difference]:
    one, other = next(left, None), next(right, None)
    while one is not None or other is not None:
        # What has no line is behind all lines.
        a, b = _place(one), _place(other)
        if one != other:
            line = one if a <= b else other
            assert line is not None
            changes = _changes(one, other) if one and other and a == b else {}
            change = "changed" if a == b else "removed" if a < b else "added"
            yield Difference(_path(line), change, changes)
        one, other = (
            next(left, None) if a <= b else one,
            next(right, None) if b <= a else other,
        )


def _raw(line: bytes) -> bytes:
    field = line.partition(b"\t")[0]
    return b"" if field == b"-" else unquote_to_bytes(field)


def _path(line: bytes) -> str:
    return "/" + _text(_raw(line))


def _text(raw: bytes) -> str:
    return raw.decode(errors="backslashreplace")


def _place(line: bytes | None) -> tuple[bool, list[bytes]]:
    """Return what lines are ordered by."""
    if line is None:
        return True, []
    path = _raw(line)
    return False, path.split(b"/") if path else []


def _changes(one: bytes, other: bytes) -> dict[str, tuple[str, str]]:
    values = [
        [_text(unquote_to_bytes(x)) for x in line.rstrip(b"\n").split(b"\t")[1:]]
        for line in (one, other)
    ]
    changes = {
        key: (a, b) for key, a, b in zip(_FIELDS, *values, strict=True) if a != b
    }
    if "type" in changes:
        was, is_now = changes["type"]
        return {"type": (_TYPES.get(was, was), _TYPES.get(is_now, is_now))}
    link = values[0][_FIELDS.index("link")], values[1][_FIELDS.index("link")]
    if ("-" in link) and link != ("-", "-"):
        for key in _OF_FIRST:
            changes.pop(key, None)
    return changes


def new_bytes(old: Digests | None, new: Digests) -> int:
    """Return how many bytes the units have that an older version of an image has not;
    None: there is no older version."""

    def units(digests: Digests) -> list[bytes]:
        found = digests.units
        return [
            found[at : at + DIGEST_BYTES] for at in range(0, len(found), DIGEST_BYTES)
        ]

    known = set(units(old)) if old is not None else set()
    lacking = {
        digest: min(new.unit_bytes, new.size_bytes - number * new.unit_bytes)
        for number, digest in enumerate(units(new))
        if digest not in known
    }
    return sum(lacking.values())
