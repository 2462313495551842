"""Disks that lose power: what a program has written, and blocks that are logged."""

import ctypes
import errno
import math
import mmap
import os
import random
import stat
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from support.paths import ENVIRONMENT

from btrfs_ublk.base.process import run
from btrfs_ublk.kernel import loop_device, mounted

CREATE, WRITE, TRUNCATE, PUNCH, SYNC, SYNC_NAMES, RENAME, UNLINK = range(1, 9)
ANSWER, LINK, MKDIR = range(9, 12)
RECORD = struct.Struct("<IIQQQQ")
SECTOR = 512
NAMES = (CREATE, RENAME, UNLINK, LINK, MKDIR)


@dataclass(frozen=True)
class Operation:
    """One record; ``offset`` and ``length`` in bytes. ``file`` is a number that no
    other file has, even if it has the inode later."""

    kind: int
    file: int
    name: str
    offset: int
    length: int
    data: bytes


def logged_writes(build: Path, log: Path, directory: Path) -> dict[str, str]:
    """Return variables that have a program of that build log what it does in a
    directory."""
    return {
        "LD_PRELOAD": str(build / "csrc/tests/write-log.so"),
        "WRITE_LOG": str(log),
        "WRITE_LOG_DIR": str(directory),
        "ASAN_OPTIONS": "verify_asan_link_order=0:exitcode=99",
    }


def read_log(path: Path) -> list[Operation]:
    """All records; the last one not, where a process that was killed has cut it."""
    raw = path.read_bytes()
    operations = []
    #: How many files had an inode before.
    before: Counter[int] = Counter()
    at = 0
    while at + RECORD.size <= len(raw):
        kind, name_bytes, file, offset, length, data_bytes = RECORD.unpack_from(raw, at)
        at += RECORD.size
        if at + name_bytes + data_bytes > len(raw):
            break
        if kind in (CREATE, MKDIR):
            before[file] += 1
        file += before[file] << 64
        name = raw[at : at + name_bytes].decode()
        data = raw[at + name_bytes : at + name_bytes + data_bytes]
        operations.append(Operation(kind, file, name, offset, length, data))
        at += name_bytes + data_bytes
    return operations


def _apply(content: bytearray, operation: Operation) -> None:
    """One operation on the content of its file, as a whole."""
    if operation.kind == TRUNCATE:
        size = operation.offset
        if len(content) > size:
            del content[size:]
        else:
            content.extend(bytes(size - len(content)))
    elif operation.kind == PUNCH:
        end = min(operation.offset + operation.length, len(content))
        if end > operation.offset:
            content[operation.offset : end] = bytes(end - operation.offset)
    else:
        end = operation.offset + len(operation.data)
        if len(content) < end:
            content.extend(bytes(end - len(content)))
        content[operation.offset : end] = operation.data


def _tear(operation: Operation, source: random.Random) -> list[Operation]:
    """Some of the sectors of a write, or some front part of a punch."""
    if operation.kind == PUNCH:
        length = source.randrange(operation.length + 1) // SECTOR * SECTOR
        return [Operation(PUNCH, operation.file, "", operation.offset, length, b"")]
    parts = []
    at = operation.offset
    end = at + len(operation.data)
    while at < end:
        until = min(end, at // SECTOR * SECTOR + SECTOR)
        if source.random() < 0.5:
            data = operation.data[at - operation.offset : until - operation.offset]
            parts.append(Operation(WRITE, operation.file, "", at, 0, data))
        at = until
    return parts


@dataclass
class Disk:
    """Durable content and names, and what is on its way there. A directory is a name
    with a number that is in ``directories``."""

    contents: dict[int, bytearray] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    directories: set[int] = field(default_factory=set)
    waiting: dict[int, list[Operation]] = field(default_factory=dict)
    #: With each, the directories whose sync includes it.
    waiting_names: list[tuple[Operation, set[str]]] = field(default_factory=list)
    #: The names as programs see them.
    _seen: dict[str, int] = field(default_factory=dict)

    def add(self, operation: Operation) -> None:
        """The next operation of the log."""
        file = operation.file
        if operation.kind in NAMES:
            if operation.kind == MKDIR:
                self.directories.add(file)
            if operation.name:
                self._add_name(operation)
        elif operation.kind == SYNC:
            content = self.contents.setdefault(file, bytearray())
            for earlier in self.waiting.pop(file, []):
                _apply(content, earlier)
            # With the file, its name: all names up to the last one that is of it.
            self._settle(lambda name, within: name.file == file)
        elif operation.kind == SYNC_NAMES:
            self._settle(lambda name, within: operation.name in within)
        elif operation.kind != ANSWER:
            self.waiting.setdefault(file, []).append(operation)

    def _add_name(self, operation: Operation) -> None:
        within = {os.path.dirname(operation.name)}
        if operation.kind == RENAME:
            old = [n for n, file in self._seen.items() if file == operation.file]
            within |= {os.path.dirname(name) for name in old}
        self.waiting_names.append((operation, within))
        _apply_names(self._seen, [operation])

    def _settle(self, ends: Callable[[Operation, set[str]], bool]) -> None:
        """Make all names durable up to the last one for which this is true."""
        mine = [n for n, each in enumerate(self.waiting_names) if ends(*each)]
        if mine:
            done = self.waiting_names[: mine[-1] + 1]
            _apply_names(self.names, [operation for operation, _ in done])
            del self.waiting_names[: len(done)]

    def after_loss(
        self, mode: str, source: random.Random
    ) -> tuple[dict[str, bytes], list[str]]:
        """Files by name, and directories: ``none`` of what was under way, ``all`` of
        it, or ``some``."""
        names = dict(self.names)
        count = {"none": 0, "all": len(self.waiting_names)}.get(mode)
        if count is None:
            count = source.randrange(len(self.waiting_names) + 1)
        _apply_names(names, [operation for operation, _ in self.waiting_names[:count]])
        files = {
            name: bytes(self._content_after(file, mode, source))
            for name, file in names.items()
            if file not in self.directories
        }
        return files, sorted(names.keys() - files.keys())

    def _content_after(self, file: int, mode: str, source: random.Random) -> bytearray:
        content = bytearray(self.contents.get(file, b""))
        for operation in self.waiting.get(file, []) if mode != "none" else []:
            fate = source.random() if mode == "some" else 0.0
            if fate < 0.4 or (fate < 0.6 and operation.kind == TRUNCATE):
                _apply(content, operation)
            elif fate < 0.7 and operation.kind != TRUNCATE:
                for part in _tear(operation, source):
                    _apply(content, part)
        return content


def _apply_names(names: dict[str, int], operations: list[Operation]) -> None:
    for operation in operations:
        name = operation.name
        if operation.kind == UNLINK:
            names.pop(name, None)
            continue
        if operation.kind == RENAME:
            for old in [n for n, file in names.items() if file == operation.file]:
                del names[old]
                # What is in a directory moves with it.
                for each in [n for n in names if n.startswith(f"{old}/")]:
                    names[name + each[len(old) :]] = names.pop(each)
        names[name] = operation.file


@dataclass(frozen=True)
class State:
    """What may be found after the loss; ``answers`` were given before it."""

    operations: int
    answers: int
    mode: str
    files: dict[str, bytes] = field(repr=False)
    directories: list[str] = field(default_factory=list)


def states(operations: list[Operation], *, some: int, seed: int) -> Iterator[State]:
    """After each operation: none, all and ``some`` parts of what was under way."""
    source = random.Random(seed)
    disk = Disk()
    answers = 0
    modes = ["none", "all"] + ["some"] * some
    for number, operation in enumerate(operations, start=1):
        disk.add(operation)
        answers += operation.kind == ANSWER
        for mode in modes:
            files, directories = disk.after_loss(mode, source)
            yield State(number, answers, mode, files, directories)


def some_states(
    operations: list[Operation], *, least: int, seed: int
) -> Iterator[State]:
    """At least so many of all states, spread over all operations and modes."""
    some = least // len(operations) + 1
    modes = 2 + some
    step = max(1, len(operations) * modes // least)
    while math.gcd(step, modes) > 1:
        step -= 1
    yield from islice(states(operations, some=some, seed=seed), 0, None, step)


def lay_out(state: State, directory: Path) -> None:
    """The files of a state, and nothing else, in ``directory`` (made if need be)."""
    directory.mkdir(mode=0o700, exist_ok=True)
    kept = {*state.files, *state.directories}
    for path in sorted(directory.rglob("*"), reverse=True):
        if str(path.relative_to(directory)) not in kept:
            path.rmdir() if path.is_dir() else path.unlink()
    for name in state.directories:
        (directory / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in state.files.items():
        (directory / name).write_bytes(content)


BLOCK_BYTES = 4096
NAME = "disk"
FileSystem = Literal["btrfs", "ext4", "xfs"]
MAKE = {
    "btrfs": ["mkfs.btrfs", "-q", "-K"],
    "ext4": ["mkfs.ext4", "-q", "-b", "4096", "-E", "nodiscard"],
    "xfs": ["mkfs.xfs", "-q", "-K", "-s", "size=4096"],
}
_TIMEOUT_S = 120.0
_ROOT, _FILE = 1, 2
_MAX_BYTES = 1 << 20
#: linux/fuse.h: the operations that a file below a loop device needs.
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _WRITE = 1, 2, 3, 14, 15, 16
_STATFS, _RELEASE, _FSYNC, _FLUSH, _INIT, _OPENDIR, _RELEASEDIR = (
    *(17, 18, 20, 25, 26, 27, 29),
)
_INTERRUPT, _DESTROY, _BATCH_FORGET, _FALLOCATE = 36, 38, 42, 43
_IN, _OUT = struct.Struct("=IIQQIIIHH"), struct.Struct("=IiQ")
_INIT_IN, _INIT_OUT = struct.Struct("=IIII"), struct.Struct("=IIIIHHIIHHII24x")
_ATTR = struct.Struct("=6Q10I")
_TRANSFER = struct.Struct("=QQIIQII")
_FALLOCATE_IN = struct.Struct("=QQQII")
_FLAGS = 1 << 0 | 1 << 5 | 1 << 22  # ASYNC_READ, BIG_WRITES, MAX_PAGES
_PUNCH_HOLE, _ZERO_RANGE = 2, 16  # fallocate(2)
_PR_SET_IO_FLUSHER = 57
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_libc = ctypes.CDLL(None, use_errno=True)


class _Server:
    """Answers one request after the other, so the log has the order of the answers."""

    def __init__(self, disk: int, log: int, fuse: int) -> None:
        self._disk, self._log, self._fuse = disk, log, fuse
        self._size_bytes = os.fstat(disk).st_size
        self._calls = {
            _INIT: self._init,
            _LOOKUP: self._lookup,
            _GETATTR: lambda node, body: bytes(16) + self._attributes(node),
            _OPEN: lambda node, body: bytes(16),
            _OPENDIR: lambda node, body: bytes(16),
            _READ: self._read,
            _WRITE: self._write,
            _FSYNC: self._sync,
            _FALLOCATE: self._fallocate,
            _STATFS: lambda node, body: bytes(80),
            **dict.fromkeys((_RELEASE, _RELEASEDIR, _FLUSH), lambda node, body: b""),
        }

    def run(self) -> None:
        """Serve until the file system is unmounted."""
        while True:
            try:
                request = memoryview(os.read(self._fuse, _MAX_BYTES + 8192))
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            _, call, unique, node, *_ = _IN.unpack_from(request)
            if call in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            if call == _DESTROY:
                return
            try:
                if call not in self._calls:
                    raise OSError(errno.ENOSYS, "")
                answer, failed = self._calls[call](node, request[_IN.size :]), 0
            except OSError as error:
                answer, failed = b"", -(error.errno or errno.EIO)
            with suppress(FileNotFoundError):  # the request was interrupted
                head = _OUT.pack(_OUT.size + len(answer), failed, unique)
                os.writev(self._fuse, [head, answer])

    def _init(self, node: int, body: memoryview) -> bytes:
        major, minor, ahead, flags = _INIT_IN.unpack_from(body)
        pages = _MAX_BYTES // mmap.PAGESIZE
        known = flags & _FLAGS
        return _INIT_OUT.pack(
            *(7, min(minor, 36), ahead, known, 64, 48, _MAX_BYTES, 1, pages, 0, 0, 0)
        )

    def _attributes(self, node: int) -> bytes:
        is_file = node == _FILE
        mode = stat.S_IFREG | 0o600 if is_file else stat.S_IFDIR | 0o700
        size = self._size_bytes if is_file else 0
        return _ATTR.pack(
            *(node, size, size // 512, 0, 0, 0, 0, 0, 0),
            *(mode, 1, 0, 0, 0, BLOCK_BYTES, 0),
        )

    def _lookup(self, node: int, body: memoryview) -> bytes:
        if bytes(body).rstrip(b"\0") != NAME.encode():
            raise FileNotFoundError(errno.ENOENT, "")
        return struct.pack("=QQ24x", _FILE, 0) + self._attributes(_FILE)

    def _read(self, node: int, body: memoryview) -> bytes:
        _, offset, length, *_ = _TRANSFER.unpack_from(body)
        return os.pread(self._disk, length, offset)

    def _write(self, node: int, body: memoryview) -> bytes:
        _, offset, length, *_ = _TRANSFER.unpack_from(body)
        data = body[_TRANSFER.size : _TRANSFER.size + length]
        os.pwrite(self._disk, data, offset)
        self._add(WRITE, offset, 0, data)
        return struct.pack("=II", length, 0)

    def _sync(self, node: int, body: memoryview) -> bytes:
        self._add(SYNC, 0, 0)
        return b""

    def _fallocate(self, node: int, body: memoryview) -> bytes:
        _, offset, length, mode, _ = _FALLOCATE_IN.unpack_from(body)
        if mode & (_PUNCH_HOLE | _ZERO_RANGE):
            punch(self._disk, offset, length)
            self._add(PUNCH, offset, length)
        return b""

    def _add(
        self, kind: int, offset: int, length: int, data: memoryview | bytes = b""
    ) -> None:
        head = RECORD.pack(kind, 0, _FILE, offset, length, len(data))
        if os.writev(self._log, [head, data]) != len(head) + len(data):
            raise OSError(errno.ENOSPC, "")


def punch(fd: int, offset: int, length: int) -> None:
    """Make a hole in a file. Raises OSError."""
    result = _libc.fallocate(
        fd, _PUNCH_HOLE | 1, ctypes.c_int64(offset), ctypes.c_int64(length)
    )
    if result:
        raise OSError(ctypes.get_errno(), "fallocate")


@contextmanager
def logged_disk(disk: Path, log: Path, directory: Path) -> Iterator[Path]:
    """Serve the file ``disk`` as a file in ``directory``, whose path is yielded, and
    append to ``log``. Position in the log: its size in bytes."""
    argv = [sys.executable, "-m", "support.disks", str(disk), str(log), str(directory)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=ENVIRONMENT) as server:
        assert server.stdout is not None
        try:
            if server.stdout.readline() != b"ready\n":
                raise OSError("the logged disk's server has ended")
            yield directory / NAME
        finally:
            run(["umount", directory], timeout_s=_TIMEOUT_S)
            server.wait(30)


def _copy(file: Path, to: Path) -> None:
    run(["cp", "--sparse=auto", file, to], timeout_s=_TIMEOUT_S)


@contextmanager
def mounted_disk(
    disk: Path, target: Path, kind: FileSystem, *, direct_io: bool = False
) -> Iterator[Path]:
    """Mount a disk, or a state of it, at ``target``."""
    with (
        loop_device(disk, direct_io=direct_io, lifeline=True) as device,
        mounted(device.path, target, fs_type=kind),
    ):
        yield target


@contextmanager
def recording(top: Path, kind: FileSystem, *, size_bytes: int) -> Iterator[Path]:
    """Yield top/disk, where a new file system is mounted whose disk logs to top/log;
    top/initial is what it is at first, for a `Replay`."""
    for name in ("fuse", "disk"):
        (top / name).mkdir()
    image = top / "recorded"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    run([*MAKE[kind], image], timeout_s=_TIMEOUT_S)
    _copy(image, top / "initial")
    with (
        logged_disk(image, top / "log", top / "fuse") as served,
        mounted_disk(served, top / "disk", kind, direct_io=True) as target,
    ):
        yield target
    image.unlink()


@dataclass(frozen=True)
class Record:
    kind: int
    offset: int
    length: int
    at: int  # where its data are in the log
    end: int  # position after it, in bytes


class Replay:
    """What the disk holds, from the start on, when it was as the file ``initial``;
    ``work`` is a file of our own. Writes that no flush has followed are torn between
    blocks of ``sector_bytes``."""

    def __init__(
        self, initial: Path, log: Path, work: Path, *, sector_bytes: int = BLOCK_BYTES
    ) -> None:
        self._durable, self._sector_bytes = work, sector_bytes
        _copy(initial, work)
        self._log: mmap.mmap | bytes = b""  # an empty file cannot be mapped
        if log.stat().st_size:
            with log.open("rb") as file:
                self._log = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.records = list(self._parse())
        self._done = 0
        self._waiting: list[Record] = []

    def _parse(self) -> Iterator[Record]:
        at = 0
        while at + RECORD.size <= len(self._log):
            kind, _, _, offset, length, data_bytes = RECORD.unpack_from(self._log, at)
            at += RECORD.size + data_bytes
            if at > len(self._log):
                return
            if kind == WRITE:
                length = data_bytes
            yield Record(kind, offset, length, at - data_bytes, at)

    def advance(self, count: int) -> None:
        """Go on until the first ``count`` records are done."""
        with self._durable.open("r+b") as file:
            for record in self.records[self._done : count]:
                if record.kind != SYNC:
                    self._waiting.append(record)
                    continue
                for each in self._waiting:
                    self._apply(file.fileno(), each, each.offset, each.length)
                self._waiting.clear()
        self._done = count

    def count(self, position: int) -> int:
        """Return how many records end at this position of the log, or before it."""
        return sum(record.end <= position for record in self.records)

    def under_way(self) -> list[int]:
        """Return how many writes wait for a flush after 0, 1, 2… records."""
        found = [0]
        for record in self.records:
            found.append(0 if record.kind == SYNC else found[-1] + 1)
        return found

    def lay_out(self, target: Path, mode: str, source: random.Random) -> None:
        """Write a state to ``target``: ``none`` of what waits, ``all``, or ``some``."""
        _copy(self._durable, target)
        if mode == "none":
            return
        with target.open("r+b") as file:
            for each in self._waiting:
                fate = source.random() if mode == "some" else 0.0
                if fate < 0.4:
                    self._apply(file.fileno(), each, each.offset, each.length)
                elif fate < 0.7:
                    for at, length in self._sectors(each):
                        if source.random() < 0.5:
                            self._apply(file.fileno(), each, at, length)

    def _sectors(self, record: Record) -> Iterator[tuple[int, int]]:
        """Yield the offsets and lengths of what is written as a whole."""
        at, end = record.offset, record.offset + record.length
        while at < end:
            whole = record.kind == PUNCH or self._is_superblock(record, at)
            length = min(BLOCK_BYTES if whole else self._sector_bytes, end - at)
            yield at, length
            at += length

    def _is_superblock(self, record: Record, at: int) -> bool:
        # No btrfs, and no ext4, starts from a superblock that is torn.
        data = record.at + at - record.offset
        block = self._log[data : data + BLOCK_BYTES]
        is_first = at == 0 and block[1080:1082] == b"\x53\xef"
        return is_first or block[64:72] == b"_BHRfS_M"

    def _apply(self, fd: int, record: Record, offset: int, length: int) -> None:
        if record.kind == PUNCH:
            punch(fd, offset, length)
        else:
            at = record.at + offset - record.offset
            os.pwrite(fd, memoryview(self._log)[at : at + length], offset)


def _serve(disk: str, log: str, directory: str) -> None:
    # Writing back the pages of others must not wait for pages that wait for us.
    _libc.prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0)
    fuse = os.open("/dev/fuse", os.O_RDWR)
    server = _Server(
        os.open(disk, os.O_RDWR),
        os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
        fuse,
    )
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,max_read={_MAX_BYTES}"
    mounted = _libc.mount(
        *(b"logged-disk", directory.encode(), b"fuse", _MS_NOSUID_NODEV_NOEXEC),
        options.encode(),
    )
    if mounted:
        raise OSError(ctypes.get_errno(), "mount")
    print("ready", flush=True)
    server.run()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
