"""The tree that the layers of an image make, as far as a start is derived from it:
names, links, what ELF files need, and the content of programs that are text."""

from __future__ import annotations

import io
import tarfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import zstandard

from btrfs_ublk.image.start.elf import MAGIC, Elf, read_elf
from btrfs_ublk.units import GIB, KIB, MIB

_OPAQUE, _WHITEOUT = ".wh..wh..opq", ".wh."
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
#: NB: tarfile copies what it has read and not used yet whenever it reads on, unpacked.
_READ_BYTES = 64 * KIB
#: More, no program or library has; it would be in memory at once.
_MAX_ELF_BYTES = 256 * MIB
#: Of each text that is kept, and of all together, on disk, where the image takes more
#: later. Lower layers come first, so less would leave out the application's own.
_MAX_TEXT_BYTES, _MAX_TEXTS_BYTES = 512 * KIB, 4 * GIB
#: Of a layer, unpacked: mkimage refuses more.
_MAX_LAYER_BYTES = 64 * GIB
_MAX_LINKS = 40  # MAXSYMLINKS in include/linux/namei.h


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file, or a symbolic link with a ``target``, by the ``path`` that its content
    has in the layer; ``place`` is where its text is kept."""

    path: str
    size: int = 0
    target: str | None = None
    elf: Elf | None = None
    place: int | None = None


@dataclass(kw_only=True)
class Tree:
    """``texts`` is a file for what is kept. Paths begin at the top, without "/"."""

    texts: IO[bytes]
    entries: dict[str, Entry] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add_layer(self, path: Path) -> None:
        """Put a layer, a tar that may be compressed, above what is there. Raises
        OSError, and tarfile.TarError, EOFError, zlib.error or ZstdError for what
        cannot be read."""
        with open(path, "rb") as file:
            stream: IO[bytes] = file
            if file.read(4) == _ZSTD_MAGIC:
                file.seek(0)
                reader = zstandard.ZstdDecompressor().stream_reader(
                    file, read_across_frames=True
                )
                stream = io.BufferedReader(reader, _READ_BYTES)
            else:
                file.seek(0)
            with tarfile.open(fileobj=stream, mode="r|*", bufsize=_READ_BYTES) as tar:
                below = dict(self.entries)
                for member in tar:
                    if member.offset_data + member.size > _MAX_LAYER_BYTES:
                        raise tarfile.ReadError("it is too large")
                    self._add(tar, member, below)
                    tar.members = []  # type: ignore[attr-defined] # it keeps all

    def _add(
        self, tar: tarfile.TarFile, member: tarfile.TarInfo, below: Mapping[str, Entry]
    ) -> None:
        path = normal(member.name)
        directory, _, name = path.rpartition("/")
        if name == _OPAQUE:
            self._remove(directory, below)
        elif name.startswith(_WHITEOUT):
            gone = f"{directory}/{name.removeprefix(_WHITEOUT)}".lstrip("/")
            self._remove(gone, below)
        elif member.issym():
            self._put(path, Entry(path=path, target=member.linkname))
        elif member.islnk():
            if (found := self.entries.get(normal(member.linkname))) is not None:
                self._put(path, found)
        elif member.isreg():
            self._put(path, self._file(tar, member, path))

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> Entry:
        size, name = member.size, path.rpartition("/")[2]
        runs = bool(member.mode & 0o111) or ".so" in name
        text = size <= _MAX_TEXT_BYTES and (runs or _is_text(path))
        if not text and not (runs and size <= _MAX_ELF_BYTES):
            return Entry(path=path, size=size)
        content = tar.extractfile(member)
        assert content is not None
        head = content.read(len(MAGIC))
        if head == MAGIC and runs:
            return Entry(path=path, size=size, elf=read_elf(head + content.read()))
        place = self.texts.seek(0, io.SEEK_END)
        if not text or place + size > _MAX_TEXTS_BYTES:
            return Entry(path=path, size=size)
        self.texts.write(head + content.read())
        return Entry(path=path, size=size, place=place)

    def _put(self, path: str, entry: Entry) -> None:
        self.entries[path] = entry
        while path:
            path, _, name = path.rpartition("/")
            if name in self.names[path]:
                break
            self.names[path].add(name)

    def _remove(self, top: str, below: Mapping[str, Entry]) -> None:
        """Remove what lower layers have by a name, or in a directory of it."""
        waiting = [top]
        while waiting:
            path = waiting.pop()
            if path in below and self.entries.get(path) is below[path]:
                del self.entries[path]
            names = self.names.get(path, ())
            waiting += [f"{path}/{name}".lstrip("/") for name in names]

    def find(self, path: str, directory: str = "") -> Entry | None:
        """Return the file that a path leads to, by links as well."""
        real = self.resolve(path, directory)
        return None if real is None else self.entries.get(real)

    def resolve(self, path: str, directory: str = "") -> str | None:
        """Return the path without links that a path leads to; None if there is none.
        ``directory`` is where it begins, if not at the top."""
        rest = path.split("/")[::-1]
        found = [] if path.startswith("/") else [x for x in directory.split("/") if x]
        links = 0
        while rest:
            name = rest.pop()
            if name in ("", "."):
                continue
            if name == "..":
                found = found[:-1]
                continue
            here = "/".join([*found, name])
            entry = self.entries.get(here)
            if entry is not None and entry.target is not None:
                links += 1
                if links > _MAX_LINKS:
                    return None
                rest += entry.target.split("/")[::-1]
                found = [] if entry.target.startswith("/") else found
                continue
            if entry is None and here not in self.names:
                return None
            found.append(name)
        return "/".join(found)

    def read(self, entry: Entry) -> bytes | None:
        """Return the content of a file, if it was kept."""
        if entry.place is None:
            return None
        self.texts.seek(entry.place)
        return self.texts.read(entry.size)


def _is_text(path: str) -> bool:
    return path.endswith(".py") or path.startswith("etc/ld")


def normal(path: str) -> str:
    """Return a path of a tar as it is below the top: there is no way out."""
    found: list[str] = []
    for name in path.split("/"):
        if name == "..":
            found = found[:-1]
        elif name not in ("", "."):
            found.append(name)
    return "/".join(found)
