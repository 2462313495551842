"""Verifying a sealed image as a whole: its blobs against the digests that name them,
each unit of its data against the pack, and the file system by ``btrfs check``, on a
temporary file that is put together from both.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from btrfs_ublk.base.capabilities import BTRFS_PROGS, SparseFile, require
from btrfs_ublk.base.process import describe_exit, spawn
from btrfs_ublk.base.progress import SILENT, Task
from btrfs_ublk.content.digests import DIGEST_BYTES, Digests
from btrfs_ublk.errors import BtrfsUblkError, CommandError, UsageError
from btrfs_ublk.image.access import RegistryAccess, RegistryError
from btrfs_ublk.image.documents import (
    DATA_OFFSET,
    Descriptor,
    InvalidImageError,
    SealedManifest,
    blobs_of,
    descriptors,
    parse_document,
)
from btrfs_ublk.image.indexed import check_subject, data_parts, layer_blob
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pack import (
    InvalidPackError,
    LayerSource,
    PackHeader,
    check_data,
    unpack,
)
from btrfs_ublk.image.pull import opened_sealed
from btrfs_ublk.image.reference import Name
from btrfs_ublk.image.repository import Repository
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.seed.inspect import inspect_seed
from btrfs_ublk.units import format_size

#: A bound for what would otherwise wait for ever.
_TIMEOUT_S = 86400.0
#: Of problems, and of lines of ``btrfs check``; the rest is only counted.
_MAX_PROBLEMS = 1000
_MAX_LINES = 20
#: What a registry answers for a blob that it has not, or has only the beginning of.
_LACKING = (404, 416)
_DIRECTORY_HINT = "name another directory with --directory"
#: What ``btrfs check`` says of data whose checksum is another one.
_MIRROR = re.compile(r"mirror \d+ bytenr (\d+) csum ")
#: What it says of each part of its work.
_STEP = re.compile(r"\[\d+/\d+\] ")


@dataclass
class CheckReport:
    """What was found. ``problems`` are the first 1000 of ``problem_count``; each names
    its place. Units and bytes are those of the data that are as the pack says, and of
    how many. ``btrfs_check``: "clean", what became of it, or why it was left out."""

    name: str
    digest: str | None = None
    metadata_bytes: int = 0
    units: int = 0
    right_units: int = 0
    data_bytes: int = 0
    right_bytes: int = 0
    btrfs_check: str = "left out: without a metadata pack there is no file system"
    problems: list[str] = field(default_factory=list)
    problem_count: int = 0

    @property
    def clean(self) -> bool:
        return not self.problem_count

    def add(self, where: str, what: str) -> None:
        self.problem_count += 1
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(f"{where}: {what}")

    @contextmanager
    def noting(self, where: str) -> Iterator[None]:
        """Add what is wrong with the image; what else fails is raised."""
        try:
            yield
        except (InvalidImageError, InvalidPackError) as error:
            self.add(where, error.message)

    def to_dict(self) -> dict[str, Any]:
        """What fits in JSON."""
        return {"clean": self.clean} | asdict(self)


def check_image(
    name: Name,
    access: RegistryAccess,
    *,
    directory: Path | None = None,
    with_btrfs_check: bool = True,
    task: Task = SILENT,
) -> CheckReport:
    """Verify all of a sealed image of a layout or a registry. The kernel sees nothing
    of it, and no privileges are needed.

    The temporary file is below ``directory`` ($TMPDIR, or /tmp); it takes what metadata
    and data take. ``task`` shows how many bytes were read. Raises UsageError,
    RegistryError, CapabilityError, and BtrfsUblkError when there is no room for the
    file; what is wrong with the image is in the report instead.
    """
    if with_btrfs_check:
        require(BTRFS_PROGS)
    report = CheckReport(str(name))
    with (
        report.noting("manifest"),
        _checking(name, access, report, directory, task) as check,
        putting_together(directory),
    ):
        check.run(with_btrfs_check)
    return report


@dataclass(frozen=True)
class AssembledImage:
    """``whole`` is the temporary file."""

    whole: Path
    header: PackHeader
    digests: Digests


@contextmanager
def assembled_image(
    name: Name,
    access: RegistryAccess,
    *,
    directory: Path | None = None,
    task: Task = SILENT,
) -> Iterator[AssembledImage]:
    """Put a sealed image together in a temporary file, which ends with the data, after
    all of it was compared with its digests. Arguments and errors are those of
    check_image(); InvalidImageError says what is wrong with the image first."""
    report = CheckReport(str(name))
    with _checking(name, access, report, directory, task) as check:
        with putting_together(directory):
            found = check.put_together(with_data=True)
            if found is None or not report.clean:
                raise InvalidImageError(f"{name}: {report.problems[0]}")
            header, digests = found
            os.truncate(check.whole, DATA_OFFSET + header.data_bytes)
        yield AssembledImage(check.whole, header, digests)


@contextmanager
def _checking(
    name: Name,
    access: RegistryAccess,
    report: CheckReport,
    directory: Path | None,
    task: Task,
) -> Iterator[_Check]:
    if directory is not None and not directory.is_dir():
        raise UsageError(f"{directory} is no directory", hint=_DIRECTORY_HINT)
    with (
        opened_sealed(name, access) as (place, manifest, data),
        ExitStack() as stack,
    ):
        report.digest = manifest.digest
        subject = None
        # A layout may have an index without the image that it is of.
        if (one := manifest.subject) is not None and (
            not isinstance(place, Layout) or place.has(one)
        ):
            subject = parse_document(place.read(one), one.digest)
        known = {manifest.pack, manifest.data}
        blobs = blobs_of(parse_document(data, manifest.digest), manifest.digest)
        others = [one for one in blobs if one not in known]
        with putting_together(directory):
            work = stack.enter_context(tempdir(parent=directory))
        check = _Check(place, manifest, others, subject, report, work, task)
        task.expect(check.total_bytes)
        yield check


@contextmanager
def putting_together(directory: Path | None) -> Iterator[None]:
    """Say what cannot be done when a file cannot be written."""
    try:
        yield
    except OSError as error:
        where = error.filename or directory or "the temporary directory"
        raise BtrfsUblkError(
            f"cannot put the image together: {where}: {error.strerror or error}",
            hint=_DIRECTORY_HINT,
        ) from error


@dataclass(frozen=True)
class _Check:
    """``others`` are the blobs of the image besides the pack and the data. ``subject``
    is the manifest of the ordinary image that an indexed one is of, if it is there.
    ``work`` is a directory of ours."""

    place: Layout | Repository
    manifest: SealedManifest
    others: Sequence[Descriptor]
    subject: Mapping[str, Any] | None
    report: CheckReport
    work: Path
    task: Task

    @property
    def total_bytes(self) -> int:
        """How much is read."""
        blobs = [self.manifest.pack, *self.others]
        if self.subject is not None:
            blobs += descriptors(self.subject, "layers", "the subject")
        return self.manifest.data_bytes + sum(one.size for one in blobs)

    @property
    def whole(self) -> Path:
        """The file in which the image is put together."""
        return self.work / "image"

    def run(self, with_btrfs_check: bool) -> None:
        found = self.put_together(with_data=with_btrfs_check)
        if found is None:
            return
        header, _ = found
        self.task.say("check the file system")
        self._compare(header)
        self.report.btrfs_check = "left out: --no-btrfs-check was given"
        if with_btrfs_check:
            self._btrfs_check(header)

    def put_together(self, *, with_data: bool) -> tuple[PackHeader, Digests] | None:
        """Verify all by digests, and write metadata, and perhaps data, to their places
        in a file. Returns None when there is no pack that can be used, or layers that
        have the data are missing."""
        manifest = self.manifest
        for one in self.others:
            self._is_right(one, "blob")
        found = self._unpack()
        if found is None:
            if manifest.data is not None:
                self._is_right(manifest.data, "data")
            return None
        header, digests = found
        with self.report.noting("pack"):
            indexed = manifest.subject is not None
            check_data(header, manifest.data_bytes, indexed=indexed)
            if self.subject is not None:
                check_subject(header, self.subject, "the image that it is of")
        if self._lacks_layers(header):
            return None
        if with_data:
            self._make_room(header)
        self._check_units(header, digests, with_data=with_data)
        return found

    def _lacks_layers(self, header: PackHeader) -> bool:
        """Add the layers of an indexed image that are missing. All of their units would
        be wrong, and much of what ``btrfs check`` compares."""
        found = [x for x in header.sources if not self.place.has(layer_blob(x))]
        for source in found:
            self.report.add(
                f"layer {source.layer}",
                f"it is not in {self.report.name}, and the data are in it: check the "
                "index where its image is (image push), or make it in the layout of "
                "that (image index)",
            )
        if found:
            self.report.data_bytes = header.data_bytes
            self.report.units = -(-header.data_bytes // header.unit)
            self.report.btrfs_check = "left out: layers are missing"
        return bool(found)

    def _verified(self, one: Descriptor, what: str) -> Iterator[bytes]:
        """Yield what there is of a blob; add what is wrong with it."""
        where = f"{what} {one.digest}"
        found = hashlib.sha256()
        size_bytes = 0
        with self.report.noting(where):
            for part in self._parts(one):
                wanted = part[: one.size - size_bytes]
                size_bytes += len(part)
                found.update(wanted)
                self.task.advance(len(wanted))
                yield wanted
                if size_bytes > one.size:
                    raise InvalidImageError(f"it has more than {one.size} bytes")
            if size_bytes < one.size:
                raise InvalidImageError(
                    f"it ends at byte {size_bytes}, and the manifest says {one.size}"
                )
            if (digest := f"sha256:{found.hexdigest()}") != one.digest:
                raise InvalidImageError(f"its content has the digest {digest}")

    def _parts(self, one: Descriptor) -> Iterator[bytes]:
        try:
            yield from self.place.parts(one)
        except RegistryError as error:
            if error.status not in _LACKING:
                raise
            raise InvalidImageError(error.message) from error

    def _is_right(self, one: Descriptor, what: str, path: Path | None = None) -> bool:
        """Whether all of a blob is as it must be; it is written to a new file."""
        before = self.report.problem_count
        with open(path or os.devnull, "wb") as file:
            for part in self._verified(one, what):
                file.write(part)
        return self.report.problem_count == before

    def _unpack(self) -> tuple[PackHeader, Digests] | None:
        pack = self.work / "pack"
        if self._is_right(self.manifest.pack, "pack", pack):
            with self.report.noting("pack"):
                header, digests = unpack(pack, self.whole)
                self.report.metadata_bytes = sum(length for _, length in header.extents)
                return header, digests
        return None

    def _make_room(self, header: PackHeader) -> None:
        """Make the file as large as the device. Raises CapabilityError, OSError."""
        require(SparseFile(self.work, header.device_bytes))
        status = os.statvfs(self.work)
        free_bytes = status.f_bavail * status.f_frsize
        if header.data_bytes > free_bytes:
            raise BtrfsUblkError(
                f"the data of the image have {format_size(header.data_bytes)}, and "
                f"{format_size(free_bytes)} are free below {self.work.parent}",
                hint=f"{_DIRECTORY_HINT}; --no-btrfs-check needs no room for data",
            )
        os.truncate(self.whole, header.device_bytes)

    def _check_units(
        self, header: PackHeader, digests: Digests, *, with_data: bool
    ) -> None:
        """Compare each unit, and write it to its place, right or wrong."""
        report, data = self.report, self.manifest.data
        report.data_bytes = header.data_bytes
        report.units = len(digests.units) // DIGEST_BYTES
        number = 0
        parts = iter(()) if data is None else self._verified(data, "data")
        if header.sources:
            parts = self._decoded(header)
        with open(self.whole if with_data else os.devnull, "r+b", buffering=0) as file:
            for number, unit in enumerate(_units(parts, header), 1):
                offset = (number - 1) * header.unit
                if with_data:
                    file.seek(DATA_OFFSET + offset)
                    _write(file, unit)
                expected = digests.units[(number - 1) * DIGEST_BYTES :][:DIGEST_BYTES]
                found = hashlib.sha256(unit).digest()
                if found == expected:
                    report.right_units += 1
                    report.right_bytes += len(unit)
                else:
                    report.add(
                        f"unit {number - 1} at offset {offset}",
                        f"its digest is {found.hex()}, and the pack says "
                        f"{expected.hex()}",
                    )
        if number < report.units:
            report.add(
                f"unit {number} at offset {number * header.unit}",
                f"it is missing, as are all to the last, {report.units - 1}",
            )

    def _decoded(self, header: PackHeader) -> Iterator[bytes]:
        """Yield what there is of the data of an indexed image."""
        with self.report.noting("data"):
            yield from data_parts(header, self.work, self._layer)

    def _layer(self, source: LayerSource) -> Path:
        path = self.work / "layer"
        if not self._is_right(layer_blob(source), "layer", path):
            raise InvalidImageError("what comes from that layer is not compared")
        return path

    def _compare(self, header: PackHeader) -> None:
        """Compare what the pack says of the file system with that itself."""
        try:
            layout = inspect_seed(self.whole)
        except BtrfsUblkError as error:
            # The temporary file's name means nothing to the reader.
            what = error.message.replace(str(self.whole), "the image")
            self.report.add("file system", what)
            return
        for what, found, said in (
            ("UUID", layout["fsid"], header.fsid),
            ("size of the device", layout["device_bytes"], header.device_bytes),
            # The top level is one as well.
            ("number of subvolumes", layout["subvolumes"], len(header.layers) + 1),
        ):
            if found != said:
                self.report.add(
                    "pack", f"{what} is {found}, and its header says {said}"
                )

    def _btrfs_check(self, header: PackHeader) -> None:
        """Run ``btrfs check``. NB: it may print a line for each block of the data, so
        that goes to a file."""
        said = self.work / "said"
        argv = ["btrfs", "check", "--readonly", "--check-data-csum", str(self.whole)]
        with spawn(argv, talk=said) as child:
            status = child.wait(_TIMEOUT_S)
        if status is None:
            raise CommandError(f"btrfs check did not end within {_TIMEOUT_S:g} s")
        if status == 0:
            self.report.btrfs_check = "clean"
            return
        self.report.btrfs_check = describe_exit(status)
        lines = 0
        with open(said, encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip() or _STEP.match(line):
                    continue
                lines += 1
                if lines <= _MAX_LINES:
                    text = line.strip().replace(str(self.whole), "the image")
                    self.report.add("file system", text + _place(text, header))
        if lines > _MAX_LINES:
            self.report.add("file system", f"{lines - _MAX_LINES} lines more")
        elif not lines:
            self.report.add("file system", f"btrfs check {describe_exit(status)}")


def _place(text: str, header: PackHeader) -> str:
    """Say where in the data a wrong checksum is."""
    found = _MIRROR.match(text)
    offset = int(found[1]) - DATA_OFFSET if found else -1
    if not 0 <= offset < header.data_bytes:
        return ""
    return f" (unit {offset // header.unit}, at offset {offset} of the data)"


def _units(parts: Iterator[bytes], header: PackHeader) -> Iterator[bytes]:
    """Yield units; the last one may be short. What is behind the data of the header is
    read, and left out."""
    rest = bytearray()
    left = header.data_bytes
    for part in parts:
        rest += part[:left]
        left -= min(len(part), left)
        while len(rest) >= header.unit:
            yield bytes(rest[: header.unit])
            del rest[: header.unit]
    if rest:
        yield bytes(rest)


def _write(file: IO[bytes], data: bytes) -> None:
    while data:
        data = data[file.write(data) :]
