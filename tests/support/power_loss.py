"""What a loss of power may leave of files, by a log of what was done to them.

``csrc/tests/write-log.c`` writes the log. A state is made of the first N operations: of
a file, what was done before its last sync is there, and of what was done after it,
anything: each operation as a whole, or not, and of a write any sectors. Names (create,
link, mkdir, rename, unlink) become durable in order, as in the journal of a file
system, at the latest when the file that they are of, or the directory that they are in,
is synced. That is more than file systems do to files, but for one thing: operations on
one place keep their order, as a page cache has one version of it. Names are paths below
the directory that was logged.
"""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
        """Make all names durable up to the last one of which this is true."""
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
