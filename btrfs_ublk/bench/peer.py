"""What is compared: a peer is something to read from, with known content.

Each module of ``btrfs_ublk.bench.peers`` holds some, in ``PEERS``; nothing else names
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from pathlib import Path
from pkgutil import iter_modules
from typing import Literal, Protocol, TypeVar, cast

from btrfs_ublk.bench import peers
from btrfs_ublk.bench.stamps import STAMPS, Content, write_content
from btrfs_ublk.capabilities import Capability
from btrfs_ublk.errors import UsageError
from btrfs_ublk.resources.tempdir import tempdir

_Shared = TypeVar("_Shared")


@dataclass(frozen=True)
class Setting:
    """What all peers of one comparison have in common; made by ``setting()``.

    ``size_bytes`` of each can be read. ``queues`` and ``depth`` are those of block
    servers; None leaves them to each. ``realtime`` is for ours (see BlockServer).
    """

    directory: Path
    size_bytes: int
    queues: int | None
    depth: int | None
    realtime: bool
    _stack: ExitStack
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

    def new_directory(self, name: str) -> Path:
        path = self.directory / name
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
) -> Iterator[Setting]:
    """A setting in a new directory below ``parent``, which should be on tmpfs."""
    with tempdir(parent=parent) as directory, ExitStack() as stack:
        yield Setting(directory, size_bytes, queues, depth, realtime, stack)


@dataclass(frozen=True)
class Subject:
    """A running peer. ``content`` is that of its first ``size_bytes``."""

    path: Path
    content: Content
    #: The processes that answer reads, for their CPU time; kernel threads do not count.
    server_pids: Sequence[int] = ()
    #: Whether O_DIRECT means anything there.
    direct: bool = True


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


def why_not(peer: Peer) -> str | None:
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


def find_peers(names: Sequence[str]) -> list[Peer]:
    """In that order. Raises UsageError for a name that is unknown or comes twice."""
    known = all_peers()
    for name in names:
        if name not in known:
            raise UsageError(
                f"there is no peer {name!r}", hint=f"known: {', '.join(known)}"
            )
        if names.count(name) > 1:
            raise UsageError(f"peer {name} is named twice")
    return [known[name] for name in names]
