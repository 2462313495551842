"""A lazy volume: seed, block server, sprout and mount as one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.ledger import Ledger, process_ledger
from btrfs_ublk.log import step
from btrfs_ublk.physmap import PhysicalMap
from btrfs_ublk.resources.reflink import clone_file
from btrfs_ublk.resources.tempdir import tempdir
from btrfs_ublk.seed import DEFAULT_FILENAME, MEGA_EXTENT, Seed, make_seed_by
from btrfs_ublk.server.block_server import READY_TIMEOUT_S, BlockServer
from btrfs_ublk.server.description import Segment
from btrfs_ublk.server.front_ends import FrontEndName
from btrfs_ublk.sprout import (
    DEFAULT_READ_AHEAD_BYTES,
    DEFAULT_WRITABLE_BYTES,
    Sprout,
    sprout,
)


@dataclass(frozen=True)
class Volume:
    """A mounted, writable volume whose virtual data a block server answers."""

    seed: Seed
    server: BlockServer
    sprout: Sprout

    @property
    def target(self) -> Path:
        """The mount point."""
        return self.sprout.target

    @property
    def virtual_file(self) -> Path:
        return self.target / self.seed.virtual_data.filename

    def clone(self, name: str | Path, *, offset: int, size_bytes: int) -> Path:
        """Make a new file of a range of the virtual data; no data moves.

        ``offset`` (bytes, in the virtual file) is a multiple of the block size, the
        size may be any. Raises UsageError when the file exists, BtrfsUblkError when the
        kernel refuses.
        """
        path = self.target / name
        clone_file(self.virtual_file, path, source_offset=offset, size_bytes=size_bytes)
        return path


def assert_mapping(seed: Seed, target: Path) -> PhysicalMap:
    """Prove that the kernel sees the virtual file where the server answers it.

    ``target`` is where the seed is mounted. Raises MappingError, which names the row
    and the rule, when any byte of the file would be read from elsewhere: that would be
    silent corruption.
    """
    virtual = seed.virtual_data
    mapping = PhysicalMap.read(target / virtual.filename)
    virtual.assert_matches(mapping)
    return mapping


@contextmanager
def volume(
    target: Path,
    contents: Sequence[Segment],
    *,
    virtual_data_size: int,
    virtual_data_filename: str = DEFAULT_FILENAME,
    strategy: str = MEGA_EXTENT,
    writable_bytes: int = DEFAULT_WRITABLE_BYTES,
    parent: Path | None = None,
    front_end: FrontEndName = "auto",
    queues: int | None = None,
    depth: int | None = None,
    realtime: bool = False,
    cpus: Iterable[int] | None = None,
    read_ahead_bytes: int | None = DEFAULT_READ_AHEAD_BYTES,
    ready_timeout_s: float = READY_TIMEOUT_S,
    observe: Callable[[str, object], None] = lambda stage, thing: None,
    ledger: Ledger | None = None,
) -> Iterator[Volume]:
    """Make a volume, mount it on the directory ``target``; take all down at the end.

    ``contents`` answer ranges of the virtual file (offsets count from its start); what
    they leave free gives EIO. Sizes are bytes. ``strategy``, "mega-extent" or
    "fallocate", makes the seed. Images go to a temporary directory below ``parent``.
    ``front_end``, ``queues``, ``depth``, ``realtime``, ``cpus`` and ``ready_timeout_s``
    are BlockServer's, ``read_ahead_bytes`` is sprout()'s. ``observe(stage, thing)`` is
    told when each stage is reached: "seed" (a Seed), "server" (a BlockServer),
    "mapping" (a PhysicalMap), "sprout" (a Sprout).
    """
    ledger = ledger or process_ledger()
    with ExitStack() as stack:
        directory = stack.enter_context(tempdir(parent=parent, ledger=ledger))
        with step("make the seed"):
            seed = make_seed_by(
                strategy,
                directory / "seed.img",
                virtual_data_size=virtual_data_size,
                virtual_data_filename=virtual_data_filename,
                metadata_only=True,
                ledger=ledger,
            )
        observe("seed", seed)
        with step("start the block server"):
            server = stack.enter_context(
                BlockServer(
                    seed.description(contents),
                    front_end=front_end,
                    queues=queues,
                    depth=depth,
                    realtime=realtime,
                    cpus=cpus,
                    ready_timeout_s=ready_timeout_s,
                    ledger=ledger,
                )
            )
        observe("server", server)
        grown = stack.enter_context(
            sprout(
                server.device,
                target,
                writable_bytes=writable_bytes,
                parent=directory,
                validate=lambda at: observe("mapping", assert_mapping(seed, at)),
                read_ahead_bytes=read_ahead_bytes,
                ledger=ledger,
            )
        )
        observe("sprout", grown)
        yield Volume(seed, server, grown)
