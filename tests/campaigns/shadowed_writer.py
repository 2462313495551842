"""Changes a directory as applications do, and knows what must be in it then.

Arguments: the directory, a lazy file on the same file system, a file with its content,
a seed. The expected content is kept in memory. Commands on standard input, a line each,
are answered by a line of JSON:

go N     begin anew in an empty directory, with N small files first
on       go on after a pause
pause    stop, but keep files and mappings open
compare  list the differences to what is expected, in the tree and in open files
release  close these files and mappings
"""

import ctypes
import errno
import json
import mmap
import os
import random
import select
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from btrfs_ublk.kernel.reflink import clone_file
from btrfs_ublk.units import BLOCK_BYTES, KIB, MIB

#: Limit of all files together, as they are in memory three times.
_MOST_BYTES = 32 * MIB
_MOST_HELD = 8
#: Pause between two operations, so that a round has some thousand, not millions.
_PAUSE_S = 0.0005
_MOST_DIFFERENCES = 20
#: fallocate(2): FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE.
_PUNCH = 3
_XATTR = "user.campaign"

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(eq=False)
class Node:
    """A file, or a directory, which has no data."""

    mode: int
    data: bytearray | None
    mtime_ns: int = 0
    xattrs: dict[str, bytes] = field(default_factory=dict)

    def write(self, offset: int, data: bytes) -> None:
        assert self.data is not None
        self.resize(max(len(self.data), offset + len(data)))
        self.data[offset : offset + len(data)] = data

    def resize(self, length: int) -> None:
        assert self.data is not None
        self.data.extend(bytes(max(0, length - len(self.data))))
        del self.data[length:]


@dataclass
class Held:
    """A file that stays open, and may be mapped. It may have lost its name."""

    node: Node
    fd: int
    mapping: mmap.mmap | None

    def write(self, offset: int, data: bytes) -> None:
        """Write through the mapping, or else to the file. Raises OSError."""
        if self.mapping is None:
            if os.pwrite(self.fd, data, offset) != len(data):
                raise OSError("a write was short")
            return
        file = os.memfd_create("data", os.MFD_CLOEXEC)
        # NB: a store would end this process by SIGBUS where the page cannot be had, as
        # nobody serves the device any more. A system call that copies there fails.
        with (
            os.fdopen(file, "wb", buffering=0) as source,
            memoryview(self.mapping) as whole,
            whole[offset : offset + len(data)] as part,
        ):
            source.write(data)
            if os.preadv(file, [part], 0) != len(data):
                raise OSError(errno.EFAULT, "a part of the mapping cannot be written")

    def close(self) -> None:
        if self.mapping is not None:
            self.mapping.close()
        os.close(self.fd)


class Writer:
    """The directory tree, and what must be in it."""

    def __init__(self, top: Path, lazy: Path, content: bytes, seed: int) -> None:
        self._top = top
        self._lazy = lazy
        self._content = content
        self._chances = random.Random(seed)
        #: All nodes by their paths below the top, which is "" itself.
        self._tree: dict[str, Node] = {}
        self._held: list[Held] = []
        #: Names for which an operation failed, so that their state is unknown.
        self._unsure: set[str] = set()
        self._touched: set[str] = set()
        self._names = 0
        self._small_files = 0
        self.operations = 0
        self.errors: list[str] = []
        self._choices: list[Callable[[], None]] = [
            *[self._create] * 6,
            *[self._append, self._overwrite, self._map_and_exit, self._direct] * 2,
            *[self._hold, self._write_held, self._rename_over, self._truncate] * 2,
            *[self._allocate, self._punch, self._reflink, self._set_xattr],
            *[self._change_mode, self._unlink, self._make_dir, self._remove_dir],
        ]

    def begin(self, small_files: int) -> None:
        """Remove the tree, and begin with an empty one."""
        self.release()
        if self._top.exists():
            shutil.rmtree(self._top)
        self._top.mkdir()
        self._tree = {"": Node(0o755, None)}
        self._unsure.clear()
        self.operations, self.errors = 0, []
        self._top.chmod(0o755)
        self._note("")
        self._small_files = small_files

    def step(self) -> None:
        """Do one operation."""
        if self._small_files:
            self._small_files -= 1
            self._try(self._create_small)
            return
        while sum(len(each.data or b"") for each in self._tree.values()) > _MOST_BYTES:
            self._try(self._unlink)
        self._try(self._chances.choice(self._choices))
        time.sleep(_PAUSE_S)

    def release(self) -> None:
        while self._held:
            self._held.pop().close()

    def differences(self) -> list[str]:
        """Return descriptions of the first differences between tree and memory."""
        found = list(self._differing())
        return found[:_MOST_DIFFERENCES] + ["…"] * (len(found) - _MOST_DIFFERENCES)

    # Operations of applications.

    def _create(self) -> None:
        self._put(self._new_name(), self._bytes())

    def _create_small(self) -> None:
        self._names += 1
        self._put(f"small{self._names}", self._bytes(self._chances.randint(0, 5000)))

    def _append(self) -> None:
        if (name := self._any_file()) is None:
            return
        data, node = self._bytes(), self._tree[name]
        assert node.data is not None
        with self._path(name).open("ab") as file:
            file.write(data)
        node.write(len(node.data), data)
        self._note(name)

    def _overwrite(self) -> None:
        if (name := self._any_file()) is not None:
            self._write_in(name, self._tree[name])

    def _map_and_exit(self) -> None:
        """Write through a mapping in a process that ends without syncing it."""
        if (name := self._any_file(empty=False)) is None:
            return
        node, path = self._tree[name], self._path(name)
        offset, data = self._part_of(node)
        child = os.fork()
        if child == 0:
            try:
                with path.open("r+b") as file:
                    mapping = mmap.mmap(file.fileno(), 0)
                    mapping[offset : offset + len(data)] = data
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(child, 0)[1] != 0:
            raise OSError("a process that wrote through a mapping has failed")
        node.write(offset, data)
        self._note(name)

    def _direct(self) -> None:
        if (name := self._any_file()) is None:
            return
        node = self._tree[name]
        assert node.data is not None
        blocks = self._chances.randint(1, 16)
        offset = self._chances.randint(0, len(node.data) // BLOCK_BYTES) * BLOCK_BYTES
        with mmap.mmap(-1, blocks * BLOCK_BYTES) as buffer:
            buffer[:] = self._chances.randbytes(len(buffer))
            fd = os.open(self._path(name), os.O_WRONLY | os.O_DIRECT)
            try:
                if os.pwrite(fd, buffer, offset) != len(buffer):
                    raise OSError("a direct write was short")
            finally:
                os.close(fd)
            node.write(offset, bytes(buffer))
        self._note(name)

    def _hold(self) -> None:
        if (name := self._any_file(empty=False)) is None:
            return
        if len(self._held) == _MOST_HELD:
            self._held.pop(0).close()
        fd = os.open(self._path(name), os.O_RDWR)
        mapped = self._chances.random() < 0.5
        mapping = mmap.mmap(fd, 0) if mapped else None
        self._held.append(Held(self._tree[name], fd, mapping))

    def _write_held(self) -> None:
        if not self._held:
            return
        held = self._chances.choice(self._held)
        node = held.node
        assert node.data is not None
        if held.mapping is None:
            offset, data = self._chances.randint(0, len(node.data)), self._bytes()
        else:
            # There is nothing beyond the end of a truncated file.
            end = min(len(held.mapping), len(node.data))
            if not end:
                return
            offset = self._chances.randrange(end)
            data = self._bytes(min(end - offset, 3 * BLOCK_BYTES))
        # If this fails, the file may have a new time, or a part of the data.
        self._touched |= {name for name, each in self._tree.items() if each is node}
        try:
            held.write(offset, data)
        except OSError:
            self._held.remove(held)
            held.close()
            raise
        node.write(offset, data)
        node.mtime_ns = os.fstat(held.fd).st_mtime_ns

    def _rename_over(self) -> None:
        """Replace a file by renaming another one, as editors do."""
        if (name := self._any_file()) is None:
            return
        other = self._new_name()
        self._put(other, self._bytes())
        self._path(other).rename(self._path(name))
        self._tree[name] = self._tree.pop(other)
        self._note(name)
        self._note(self._parent(other))

    def _truncate(self) -> None:
        if (name := self._any_file()) is None:
            return
        node = self._tree[name]
        assert node.data is not None
        length = self._chances.randint(0, 2 * len(node.data))
        os.truncate(self._path(name), length)
        node.resize(length)
        self._note(name)

    def _allocate(self) -> None:
        if (name := self._any_file()) is None:
            return
        node = self._tree[name]
        assert node.data is not None
        offset = self._chances.randint(0, len(node.data))
        length = self._chances.randint(1, 256 * KIB)
        with self._path(name).open("r+b") as file:
            os.posix_fallocate(file.fileno(), offset, length)
        node.resize(max(len(node.data), offset + length))
        self._note(name)

    def _punch(self) -> None:
        if (name := self._any_file(empty=False)) is None:
            return
        node = self._tree[name]
        offset, data = self._part_of(node)
        where = map(ctypes.c_long, (offset, len(data)))
        with self._path(name).open("r+b") as file:
            if _libc.fallocate(file.fileno(), _PUNCH, *where):
                raise OSError(ctypes.get_errno(), "fallocate")
        node.write(offset, bytes(len(data)))
        self._note(name)

    def _reflink(self) -> None:
        """Clone lazy data. A write into the middle of a block has to read it first."""
        name = self._new_name()
        blocks = self._chances.randint(1, 64)
        last = len(self._content) // BLOCK_BYTES - blocks
        begin = self._chances.randint(0, last) * BLOCK_BYTES
        end = begin + blocks * BLOCK_BYTES
        clone_file(
            self._lazy, self._path(name), source_offset=begin, size_bytes=end - begin
        )
        self._path(name).chmod(0o644)
        node = self._tree[name] = Node(0o644, bytearray(self._content[begin:end]))
        self._note(name)
        self._write_in(name, node)

    def _set_xattr(self) -> None:
        if (name := self._any_file()) is None:
            return
        value = self._bytes(self._chances.randint(1, 200))
        os.setxattr(self._path(name), _XATTR, value)
        self._tree[name].xattrs[_XATTR] = value

    def _change_mode(self) -> None:
        if (name := self._any_file()) is not None:
            mode = 0o600 | self._chances.randrange(0o200)
            self._path(name).chmod(mode)
            self._tree[name].mode = mode

    def _unlink(self) -> None:
        if (name := self._any_file()) is not None:
            self._path(name).unlink()
            del self._tree[name]
            self._note(self._parent(name))

    def _make_dir(self) -> None:
        name = self._new_name()
        self._path(name).mkdir()
        self._path(name).chmod(0o755)
        self._tree[name] = Node(0o755, None)
        self._note(name)

    def _remove_dir(self) -> None:
        used = {self._parent(name) for name in self._tree.keys() | self._unsure} | {""}
        empty = sorted(self._directories() - used)
        if empty:
            name = self._chances.choice(empty)
            self._path(name).rmdir()
            del self._tree[name]
            self._note(self._parent(name))

    # Parts of operations.

    def _try(self, operation: Callable[[], None]) -> None:
        self._touched.clear()
        try:
            operation()
            self.operations += 1
        except OSError as error:
            self.errors.append(f"{operation.__name__.strip('_')}: {error}")
            self._unsure |= self._touched
            for name in self._touched & self._tree.keys() - self._directories():
                del self._tree[name]

    def _put(self, name: str, data: bytes) -> None:
        with self._path(name).open("xb") as file:
            file.write(data)
        self._path(name).chmod(0o644)
        self._tree[name] = Node(0o644, bytearray(data))
        self._note(name)

    def _write_in(self, name: str, node: Node) -> None:
        assert node.data is not None
        offset, data = self._chances.randint(0, len(node.data)), self._bytes()
        with self._path(name).open("r+b") as file:
            file.seek(offset)
            file.write(data)
        node.write(offset, data)
        self._note(name)

    def _bytes(self, length: int | None = None) -> bytes:
        if length is None:
            most = self._chances.choice([100, 4 * KIB, 20 * KIB, 256 * KIB])
            length = self._chances.randint(1, most)
        return self._chances.randbytes(length)

    def _part_of(self, node: Node) -> tuple[int, bytes]:
        assert node.data
        offset = self._chances.randrange(len(node.data))
        length = self._chances.randint(1, min(len(node.data) - offset, 64 * KIB))
        return offset, self._bytes(length)

    def _path(self, name: str) -> Path:
        self._touched |= {name, self._parent(name)}
        return self._top / name

    @staticmethod
    def _parent(name: str) -> str:
        return name.rpartition("/")[0]

    def _directories(self) -> set[str]:
        return {name for name, node in self._tree.items() if node.data is None}

    def _new_name(self) -> str:
        self._names += 1
        directory = self._chances.choice(sorted(self._directories()))
        return f"{directory}/{self._names}" if directory else str(self._names)

    def _any_file(self, *, empty: bool = True) -> str | None:
        names = [
            name
            for name, node in self._tree.items()
            if node.data or (empty and node.data is not None)
        ]
        return self._chances.choice(names) if names else None

    def _note(self, name: str) -> None:
        """Note times of a file and its directory, which applications may have seen."""
        for each in {name, self._parent(name)}:
            self._tree[each].mtime_ns = self._path(each).stat().st_mtime_ns

    # Comparison.

    def _differing(self) -> Iterator[str]:
        found = {""}
        for directory, directories, files in os.walk(self._top):
            below = os.path.relpath(directory, self._top)
            prefix = "" if below == "." else f"{below}/"
            found.update(prefix + name for name in (*directories, *files))
        names = found | self._tree.keys()
        for name in sorted(names - self._unsure):
            if name not in found:
                yield f"{name}: it is missing"
            elif name not in self._tree:
                yield f"{name}: it has no reason to be there"
            else:
                yield from self._differing_in(name, self._tree[name])
        for held in self._held:
            node = held.node
            assert node.data is not None
            if os.pread(held.fd, len(node.data) + 1, 0) != node.data:
                yield "a file that is held open: other content"
            end = min(len(held.mapping or b""), len(node.data))
            if held.mapping is not None and held.mapping[:end] != node.data[:end]:
                yield "a mapping that is held: other content"
        with self._lazy.open("rb") as file:
            if file.read() != self._content:
                yield f"{self._lazy.name}: other content"

    def _differing_in(self, name: str, node: Node) -> Iterator[str]:
        path = self._path(name)
        status = path.lstat()
        if stat.S_IMODE(status.st_mode) != node.mode:
            yield f"{name}: mode {status.st_mode:o}, not {node.mode:o}"
        if status.st_mtime_ns != node.mtime_ns:
            yield f"{name}: mtime {status.st_mtime_ns}, not {node.mtime_ns}"
        if stat.S_ISDIR(status.st_mode) != (node.data is None):
            yield f"{name}: mode {status.st_mode:o}"
        if node.data is None:
            return
        xattrs = {each: os.getxattr(path, each) for each in os.listxattr(path)}
        if xattrs != node.xattrs:
            yield f"{name}: other extended attributes"
        if status.st_size != len(node.data):
            yield f"{name}: {status.st_size} bytes, not {len(node.data)}"
        elif (read := path.read_bytes()) != node.data:
            pairs = zip(read, node.data, strict=True)
            first = next(at for at, (is_so, be) in enumerate(pairs) if is_so != be)
            yield f"{name}: other content from byte {first} of {len(node.data)} on"


def main() -> None:
    top, lazy, content, seed = sys.argv[1:]
    writer = Writer(Path(top), Path(lazy), Path(content).read_bytes(), int(seed))
    is_writing = False
    while True:
        ready, _, _ = select.select([0], [], [], 0 if is_writing else None)
        if not ready:
            writer.step()
            continue
        words = os.read(0, 100).decode().split()
        if not words:
            return
        answer: list[str] = []
        is_writing = words[0] in ("go", "on")
        if words[0] == "go":
            writer.begin(int(words[1]))
        elif words[0] == "compare":
            answer = writer.differences()
        elif words[0] == "release":
            writer.release()
        reply = {
            "differences": answer,
            "operations": writer.operations,
            "errors": writer.errors,
        }
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
