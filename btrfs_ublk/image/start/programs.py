"""Which files an image's command reads before it does its own work, by the rules of
execve(2), ld.so(8) and interpreters."""

from __future__ import annotations

import lzma
import shlex
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from btrfs_ublk.image.start.elf import Elf
from btrfs_ublk.image.start.java import is_java, is_whole, java_files
from btrfs_ublk.image.start.python import PythonStart, is_python
from btrfs_ublk.image.start.tree import Entry, Tree
from btrfs_ublk.units import KIB, MIB

#: Where programs are without PATH; containerd's and Docker's default.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Where the linkers of glibc and musl search at last.
_LIBRARIES = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib")
#: What the C library asks when a program asks for users, hosts or the time.
_SETTINGS = (
    *("etc/nsswitch.conf", "etc/passwd", "etc/group", "etc/localtime"),
    *("etc/host.conf", "etc/hosts", "etc/resolv.conf"),
)
#: What libcrypto reads when it is loaded, where distributions have it.
_OPENSSL = ("usr/lib/ssl/openssl.cnf", "etc/ssl/openssl.cnf", "etc/pki/tls/openssl.cnf")
#: Of a file that is larger, only the parts that are read before it runs come first:
#: its head has symbols and relocations, which are applied to what is writable.
_WHOLE_BYTES = 16 * MIB
_HEAD_BYTES, _WRITABLE_BYTES, _ENTRY_BYTES = MIB, 4 * MIB, 256 * KIB
#: Scripts that run each other, words of a command, and interpreters of Python.
_MAX_DEPTH, _MAX_WORDS, _MAX_PYTHONS = 4, 64, 4
#: In all, as the files are read.
_MAX_BYTES = 128 * MIB


class Range(NamedTuple):
    """Bytes of a file, whose path begins at the image's top, without "/"."""

    path: str
    offset: int
    length: int


def command_ranges(
    layers: Sequence[Path], config: Mapping[str, Any], work: Path
) -> list[Range]:
    """Return what the command of an image reads at its start, in that order: nothing,
    when the image has no command, or its layers cannot be read here (what makes the
    image says why). ``layers`` are tars, and ``work`` a directory for a temporary file.
    Raises OSError.
    """
    start = _Start.of(config)
    if not start.words:
        return []
    unreadable = (
        *(tarfile.TarError, EOFError, ValueError, LookupError, ArithmeticError),
        *(zlib.error, lzma.LZMAError, zstandard.ZstdError),
    )
    with tempfile.TemporaryFile(dir=work) as texts:
        tree = Tree(texts=texts)
        with suppress(*unreadable):
            for layer in layers:
                tree.add_layer(layer)
            return list(_bounded(_Derived(tree, start).ranges()))
    return []


def _bounded(ranges: Iterator[Range]) -> Iterator[Range]:
    left = _MAX_BYTES
    for one in ranges:
        left -= one.length
        if left < 0:
            return
        yield one


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What a configuration says of the start. What is malformed counts as absent."""

    words: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Start:
        found = config.get("config")
        keys: Mapping[str, Any] = found if isinstance(found, dict) else {}

        def strings(key: str) -> list[str]:
            value = keys.get(key)
            given = value if isinstance(value, list) else []
            return [each for each in given if isinstance(each, str)]

        directory = keys.get("WorkingDir")
        return cls(
            words=(*strings("Entrypoint"), *strings("Cmd")),
            directory=directory if isinstance(directory, str) else "/",
            environment=dict(x.split("=", 1) for x in strings("Env") if "=" in x),
        )


@dataclass
class _Derived:
    tree: Tree
    start: _Start
    #: By path, in the order in which they are read.
    found: dict[str, Entry] = field(default_factory=dict)
    #: Interpreters of Python whose modules were taken, by their paths as given.
    pythons: set[str] = field(default_factory=set)

    def ranges(self) -> Iterator[Range]:
        self._take_command(list(self.start.words), depth=0)
        for path in _SETTINGS:
            self._take(self.tree.find(path))
        for entry in self.found.values():
            for offset, length in _parts(entry):
                yield Range(entry.path, offset, length)

    def _take(self, entry: Entry | None) -> bool:
        """Have a file come first, and return whether it is new."""
        if entry is None or not entry.size or entry.path in self.found:
            return False
        if any("\ud800" <= each <= "\udfff" for each in entry.path):
            return False  # JSON cannot have it
        self.found[entry.path] = entry
        return True

    def _take_command(self, words: list[str], depth: int) -> None:
        """Take the program, and each word that names a file: a program that an
        entrypoint runs, a script, a configuration."""
        if depth > _MAX_DEPTH:
            return
        for number, word in enumerate(words[:_MAX_WORDS]):
            found = self._program(word) if _may_name(word) else None
            if found is not None:
                self._take_program(*found, words[number + 1 :], depth)
            elif " " in word and number:  # sh -c "exec program"
                with suppress(ValueError):
                    self._take_command(shlex.split(word), depth + 1)

    def _program(self, word: str) -> tuple[str, Entry] | None:
        """Return the file that a word names, a path or a program, with its path as it
        is given."""
        if (found := self._file(word)) is not None or "/" in word:
            return (word, found) if found else None
        for directory in self.start.environment.get("PATH", _PATH).split(":"):
            path = f"{directory}/{word}"
            if (found := self._file(path)) is not None:
                return path, found
        return None

    def _file(self, path: str) -> Entry | None:
        return self.tree.find(path, self.start.directory)

    def _take_program(
        self, path: str, entry: Entry, words: list[str], depth: int
    ) -> None:
        if entry.elf is not None:
            self._take_elf(entry, entry.elf)
        elif self._take(entry):  # NB: once: scripts may name each other in many words
            text = self.tree.read(entry) or b""
            line = text[:256].partition(b"\n")[0]
            if line.startswith(b"#!"):
                with suppress(ValueError):
                    interpreter = line[2:].decode().split()
                    self._take_command([*interpreter, entry.path], depth + 1)
        if is_python(entry):
            self._take_python(path, entry, words)
        if is_java(entry):
            for one in java_files(self.tree, entry, words, self.start.directory):
                self._take_any(one)

    def _take_python(self, path: str, program: Entry, words: list[str]) -> None:
        if path in self.pythons or len(self.pythons) == _MAX_PYTHONS:
            return
        self.pythons.add(path)
        python = PythonStart(self.tree, path, program, self.start.environment)
        for entry in python.files(words, self._file):
            self._take_any(entry)

    def _take_any(self, entry: Entry) -> None:
        if entry.elf is not None:
            self._take_elf(entry, entry.elf)
        else:
            self._take(entry)

    def _take_elf(self, entry: Entry, elf: Elf) -> None:
        """Take a program, its linker, and all libraries, in the linker's order."""
        if not self._take(entry):
            return
        linker = self.tree.find(elf.interpreter) if elf.interpreter else None
        if linker is not None and self._take(linker):
            self._take(self.tree.find("etc/ld.so.cache"))
            # What a C library reads that is to convert characters.
            beside = linker.path.rpartition("/")[0]
            self._take(self.tree.find(f"{beside}/gconv/gconv-modules.cache"))
        search = self._library_path(linker)
        waiting = [(entry, elf)]
        while waiting:
            user, its = waiting.pop(0)
            for name in its.needed:
                library = self._library(name, user, its, search)
                if library is not None and library.elf is not None:
                    if self._take(library):
                        waiting.append((library, library.elf))
                        if name.startswith("libcrypto.so"):
                            self._take(_first_of(self.tree, _OPENSSL))

    def _library_path(self, linker: Entry | None) -> list[str]:
        """Return the directories that the linker's configuration has. Distributions
        build theirs so that the linker's own directory is among them."""
        own = [f"/{linker.path.rpartition('/')[0]}"] if linker else []
        configured = list(_configured(self.tree, "etc/ld.so.conf", depth=0))
        for name in self.tree.names["etc"]:
            if name.startswith("ld-musl-") and name.endswith(".path"):
                entry = self.tree.find(f"etc/{name}")
                text = self.tree.read(entry) if entry else None
                configured += (text or b"").decode("utf-8", "replace").split()
        return [*configured, *own, *_LIBRARIES]

    def _library(
        self, name: str, user: Entry, elf: Elf, search: list[str]
    ) -> Entry | None:
        if "/" in name:
            return self._file(name)
        origin = f"/{user.path.rpartition('/')[0]}"
        given = self.start.environment.get("LD_LIBRARY_PATH", "").split(":")
        own = [*(() if elf.runpath else elf.rpath), *filter(None, given), *elf.runpath]
        for directory in (*own, *search):
            directory = directory.replace("${ORIGIN}", origin)
            path = f"{directory.replace('$ORIGIN', origin)}/{name}"
            found = self.tree.find(path)
            if found is not None and found.elf and found.elf.kind == elf.kind:
                return found
        return None


def _first_of(tree: Tree, paths: Sequence[str]) -> Entry | None:
    return next(filter(None, map(tree.find, paths)), None)


def _may_name(word: str) -> bool:
    return bool(word) and not word.startswith("-") and "\0" not in word


def _configured(tree: Tree, path: str, depth: int) -> Iterator[str]:
    """Yield the directories that ld.so.conf(5) has, in its includes too."""
    entry = tree.find(path)
    text = (tree.read(entry) if entry else None) or b""
    for line in text.decode("utf-8", "replace").splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["include"] and depth < _MAX_DEPTH:
            for pattern in words[1:]:
                directory, _, names = pattern.strip("/").rpartition("/")
                for name in sorted(tree.names[tree.resolve(directory) or directory]):
                    if Path(name).match(names):
                        yield from _configured(tree, f"{directory}/{name}", depth + 1)
        elif words:
            yield words[0]


def _parts(entry: Entry) -> Iterator[tuple[int, int]]:
    """Yield the (offset, length) of a file that are read at a start."""
    if entry.size <= _WHOLE_BYTES or is_whole(entry.path):
        yield 0, entry.size
        return
    yield 0, _HEAD_BYTES
    if entry.elf is None:
        if entry.path.endswith((".jar", ".zip")):  # The directory is at the end.
            yield entry.size - _HEAD_BYTES, _HEAD_BYTES
        return
    for one in entry.elf.segments:
        if one.writable and one.offset < entry.size:
            left = entry.size - one.offset
            yield one.offset, min(one.length, left, _WRITABLE_BYTES)
    entry_at = min(entry.elf.entry, entry.size)
    yield max(entry_at - _ENTRY_BYTES // 2, 0), _ENTRY_BYTES
