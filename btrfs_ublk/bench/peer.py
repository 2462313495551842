"""What is compared: a peer is something to read from, with known content.

Each module of ``btrfs_ublk.bench.peers`` holds some, in ``PEERS``; nothing else names
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from pathlib import Path
from pkgutil import iter_modules
from typing import Literal, Protocol, TypeVar, cast

from btrfs_ublk.bench import peers
from btrfs_ublk.bench.stamps import STAMPS, Content, write_content
from btrfs_ublk.capabilities import Capability
from btrfs_ublk.resources.tempdir import tempdir

_Shared = TypeVar("_Shared")


@dataclass(frozen=True)
class Setting:
    """What all peers of one comparison have in common; made by ``setting()``.

    ``size_bytes`` of each can be read. ``queues`` and ``depth`` are those of block
    servers; None leaves them to each. ``realtime`` is for ours (see BlockServer).
    ``runtime_s`` is how long a turn takes, where that is to be chosen. ``writable``:
    they are to be written to, if they can be. ``disk`` is one that the user names.
    """

    directory: Path
    size_bytes: int
    queues: int | None
    depth: int | None
    realtime: bool
    runtime_s: float
    disk: Path | None
    _stack: ExitStack
    writable: bool = False
    _shared: dict[str, object] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def shared(
        self, name: str, make: Callable[[], AbstractContextManager[_Shared]]
    ) -> _Shared:
        """What several peers use: made by the first, it goes with the setting."""
        if name not in self._shared:
            self._shared[name] = self._stack.enter_context(make())
        return cast(_Shared, self._shared[name])

    def source_file(self) -> Path:
        """A file full of STAMPS, for those who serve one. They only read it."""
        return self.shared("source file", self._source_file)

    @contextmanager
    def _source_file(self) -> Iterator[Path]:
        path = self.directory / "source"
        write_content(path, STAMPS, self.size_bytes)
        yield path

    @contextmanager
    def new_file(self, size_bytes: int) -> Iterator[Path]:
        """A sparse file, whose memory is free again when the block is left."""
        number = next(self._numbers)
        path = self.directory / f"disk-{number}"
        try:
            with path.open("xb") as file:
                file.truncate(size_bytes)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def content_file(self) -> AbstractContextManager[Path]:
        """A file full of STAMPS: a peer's own, where it is to be written to."""
        return self._own_file() if self.writable else nullcontext(self.source_file())

    @contextmanager
    def _own_file(self) -> Iterator[Path]:
        with self.new_file(self.size_bytes) as path:
            write_content(path, STAMPS, self.size_bytes)
            yield path

    def new_directory(self, name: str) -> Path:
        """``name`` is the beginning of its name."""
        path = self.directory / f"{name}-{next(self._numbers)}"
        path.mkdir()
        return path


@contextmanager
def setting(
    parent: Path,
    *,
    size_bytes: int,
    queues: int | None = None,
    depth: int | None = None,
    realtime: bool = False,
    runtime_s: float = 1.0,
    disk: Path | None = None,
) -> Iterator[Setting]:
    """A setting in a new directory below ``parent``, which should be on tmpfs."""
    with tempdir(parent=parent) as directory, ExitStack() as stack:
        yield Setting(
            directory, size_bytes, queues, depth, realtime, runtime_s, disk, stack
        )


@dataclass(frozen=True)
class Subject:
    """A running peer. ``content`` is that of its first ``size_bytes``."""

    path: Path
    content: Content
    #: The processes that answer reads, for their CPU time; kernel threads do not count.
    server_pids: Sequence[int] = ()
    #: Whether O_DIRECT means anything there.
    direct: bool = True
    #: Whether it can be mapped into memory (mmap(2), MAP_SHARED).
    mappable: bool = True
    #: Whether it may be written to. What only one peer has may; what several share, or
    #: is somebody's, may not.
    writable: bool = False


class Peer(Protocol):
    """Something that can be read from."""

    @property
    def name(self) -> str:
        """As on command lines: "btrfs-loop"."""

    @property
    def layer(self) -> Literal["device", "file"]:
        """What is read: a block device, or a file on a file system."""

    @property
    def description(self) -> str:
        """One line."""

    @property
    def needs(self) -> Sequence[Capability]: ...

    def serving(self, setting: Setting) -> AbstractContextManager[Subject]:
        """Bring it up, filled; take it down when the block is left."""


class HasNeeds(Protocol):
    @property
    def needs(self) -> Sequence[Capability]: ...


def why_not(peer: HasNeeds) -> str | None:
    """Why the peer cannot run on this machine; None where it can.

    NB: to be asked before any is brought up: modules that were loaded for one are taken
    for somebody else's.
    """
    for capability in peer.needs:
        reason = capability.probe()
        if reason is not None:
            return f"{capability.name}: {reason}"
    return None


def all_peers() -> dict[str, Peer]:
    """By name, in the order of their modules."""
    found: dict[str, Peer] = {}
    for info in iter_modules(peers.__path__):
        module = import_module(f"{peers.__name__}.{info.name}")
        for peer in cast(Sequence[Peer], module.PEERS):
            if peer.name in found:
                raise ValueError(f"there are two peers {peer.name}")
            found[peer.name] = peer
    return found
