"""What is compared: peers are something to read from, with known content. Each module
of ``btrfs_ublk.bench.peers`` has some, in ``PEERS``, and nothing else names them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from pkgutil import iter_modules
from typing import TypeVar, cast

from btrfs_ublk.base.capabilities import Capability
from btrfs_ublk.bench import peers
from btrfs_ublk.bench.content import STAMPS, Content, write_content
from btrfs_ublk.kernel.temporary import tempdir

_Shared = TypeVar("_Shared")


@dataclass(frozen=True)
class Setting:
    """What all peers of one comparison have in common; made by ``setting()``.

    ``size_bytes`` of each can be read. ``queues`` and ``depth`` are for block servers;
    None leaves them to each. ``runtime_s`` is the duration of a turn, if it can be
    chosen.
    """

    directory: Path
    size_bytes: int
    queues: int | None
    depth: int | None
    runtime_s: float
    _stack: ExitStack
    _shared: dict[str, object] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def shared(
        self, name: str, make: Callable[[], AbstractContextManager[_Shared]]
    ) -> _Shared:
        """Return what several peers share; the first makes it, for the setting."""
        if name not in self._shared:
            self._shared[name] = self._stack.enter_context(make())
        return cast(_Shared, self._shared[name])

    @contextmanager
    def new_file(self, size_bytes: int, *, filled: bool = False) -> Iterator[Path]:
        """Make a file, sparse or ``filled`` with STAMPS; remove it after the block."""
        path = self.directory / f"disk-{next(self._numbers)}"
        try:
            with path.open("xb") as file:
                file.truncate(size_bytes)
            if filled:
                write_content(path, STAMPS, size_bytes)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def source_file(self) -> Path:
        """Return a shared file full of STAMPS, for peers that only read it."""
        make = partial(self.new_file, self.size_bytes, filled=True)
        return self.shared("source file", make)

    def new_directory(self, name: str) -> Path:
        """Make a directory whose name begins with ``name``."""
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
    runtime_s: float = 1.0,
) -> Iterator[Setting]:
    """Make a setting in a new directory below ``parent``, which should be on tmpfs."""
    with tempdir(parent=parent) as directory, ExitStack() as stack:
        yield Setting(directory, size_bytes, queues, depth, runtime_s, stack)


@dataclass(frozen=True)
class Subject:
    """A running peer. ``content`` is the content of its first ``size_bytes``."""

    path: Path
    content: Content
    #: The processes that answer reads, for their CPU time; kernel threads do not count.
    server_pids: Sequence[int] = ()
    #: Whether O_DIRECT has an effect there.
    direct: bool = True


@dataclass(frozen=True)
class Peer:
    """Something to compare. ``name`` is that on command lines ("btrfs-loop"),
    ``description`` one line, ``layer`` what is measured: a block "device" or a "file".
    ``serving`` brings it up, and takes it down after the block.
    """

    name: str
    layer: str
    description: str
    needs: Sequence[Capability]
    serving: Callable[[Setting], AbstractContextManager[Subject]]


def peer(
    name: str, layer: str, description: str, needs: Sequence[Capability] = ()
) -> Callable[[Callable[[Setting], Iterator[Subject]]], Peer]:
    """Make a peer from a function that yields a Subject."""

    def make(serve: Callable[[Setting], Iterator[Subject]]) -> Peer:
        return Peer(name, layer, description, needs, contextmanager(serve))

    return make


def why_not(peer: Peer) -> str | None:
    """Say why it cannot run on this machine; None if it can.

    NB: ask before any peer is brought up, as a module that was loaded for one would be
    taken for somebody else's.
    """
    for capability in peer.needs:
        reason = capability.probe()
        if reason is not None:
            return f"{capability.name}: {reason}"
    return None


def all_peers() -> dict[str, Peer]:
    """Return all peers by name, in the order of their modules."""
    found: dict[str, Peer] = {}
    for info in iter_modules(peers.__path__):
        module = import_module(f"{peers.__name__}.{info.name}")
        for peer in cast(Sequence[Peer], module.PEERS):
            if peer.name in found:
                raise ValueError(f"there are two peers {peer.name}")
            found[peer.name] = peer
    return found
