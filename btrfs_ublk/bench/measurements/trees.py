"""A tree of files to list, made the same way on every file system."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.units import KIB

_SEED = 20_261_120
_MAX_FILE_BYTES = 8 * KIB
#: With random letters, names do not sort in the order of making, as in real trees.
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

#: Fills a file: path, size in bytes, and the offset of its data in all content.
Fill = Callable[[Path, int, int], None]


@dataclass(frozen=True)
class TreePlan:
    """Numbers of directories, regular files and symbolic links. Equal numbers always
    give the same tree.
    """

    files: int
    directories: int
    links: int

    def _names(self) -> Iterator[tuple[str, str, int]]:
        """Yield the kind, path and size of each, parents first."""
        chances = random.Random(_SEED)
        directories = [""]
        for number in range(self.directories):
            # Real trees are deep in some places and wide in others.
            parent = directories[int(len(directories) * chances.random() ** 2)]
            path = f"{parent}{_name(chances, number)}"
            directories.append(f"{path}/")
            yield "directory", path, 0
        for number in range(self.files):
            path = f"{chances.choice(directories)}{_name(chances, number)}.so"
            yield "file", path, chances.randint(1, _MAX_FILE_BYTES)
        for number in range(self.links):
            path = f"{chances.choice(directories)}{_name(chances, number)}.link"
            yield "link", path, chances.randint(1, 60)

    @property
    def content_bytes(self) -> int:
        """The size of all files' content, with whole blocks for each file."""
        return self.files * _MAX_FILE_BYTES

    def make(self, root: Path, fill: Fill) -> None:
        """Make the tree in an empty directory."""
        offset = 0
        for kind, name, size in self._names():
            path = root / name
            if kind == "directory":
                path.mkdir()
            elif kind == "link":
                path.symlink_to("x" * size)
            else:
                fill(path, size, offset)
                offset += _MAX_FILE_BYTES

    def check(self, root: Path) -> None:
        """Raise BtrfsUblkError unless names, kinds and sizes are those of the plan."""
        wanted = {
            name: (kind, 0 if kind == "directory" else size)
            for kind, name, size in self._names()
        }
        found = {}
        for parent, directories, files in os.walk(root):
            for name in (*directories, *files):
                path = Path(parent, name)
                status = path.lstat()
                kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
                size = 0 if kind == "directory" else status.st_size
                found[str(path.relative_to(root))] = (kind, size)
        if found == wanted:
            return
        some = next(
            name
            for name in sorted({*wanted, *found})
            if wanted.get(name) != found.get(name)
        )
        raise BtrfsUblkError(
            f"{root / some} is {found.get(some)}, not {wanted.get(some)}"
        )


_KINDS = {stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "link"}


def _name(chances: random.Random, number: int) -> str:
    return "".join(chances.choices(_LETTERS, k=8)) + str(number)


def write(path: Path, size: int, offset: int) -> None:
    """Fill a file with bytes that depend on its offset."""
    path.write_bytes((offset.to_bytes(8, "little") * (size // 8 + 1))[:size])
