"""A lazy volume: seed, block server, sprout and mount as one thing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.ledger import Ledger, process_ledger
from btrfs_ublk.base.log import step
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.errors import UsageError
from btrfs_ublk.kernel.beneath import opened_directory
from btrfs_ublk.kernel.reflink import clone_beneath
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.seed import DEFAULT_FILENAME, MEGA_EXTENT, Seed, make_seed_by
from btrfs_ublk.server.block_server import READY_TIMEOUT_S, BlockServer
from btrfs_ublk.server.description import Segment
from btrfs_ublk.server.names import FrontEndName
from btrfs_ublk.volume.definition import (
    DEFAULT_READ_AHEAD_BYTES,
    DEFAULT_WRITABLE_BYTES,
)
from btrfs_ublk.volume.sprout import Sprout, sprout
from btrfs_ublk.volume.virtual_file import assert_mapping
from btrfs_ublk.volume.virtual_file import virtual_file_of as virtual_file_of


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

    def virtual_file(self) -> AbstractContextManager[Path]:
        """Yield a path of the file of all virtual data, valid within the block: see
        virtual_file_of().
        """
        return virtual_file_of(self.seed, self.target)

    def clone(self, name: StrPath, *, offset: int, size_bytes: int) -> Path:
        """Clone a range of the virtual data into a new file, without moving data.

        ``offset`` (bytes, in the virtual file) is a multiple of the block size, the
        size may be any. Raises UsageError when the file exists or the range is not
        within the virtual file, BtrfsUblkError when the kernel refuses.
        """
        path = self.target / name
        try:
            with (
                opened_directory(self.target) as top,
                self.virtual_file() as virtual,
            ):
                clone_beneath(
                    virtual,
                    top,
                    os.path.relpath(path, self.target),
                    source_offset=offset,
                    size_bytes=size_bytes,
                )
        except OSError as error:
            raise UsageError(f"new file {path}: {error.strerror}") from error
        return path


@contextmanager
def volume(
    target: StrPath,
    contents: Sequence[Segment],
    *,
    virtual_data_size: int,
    virtual_data_filename: str = DEFAULT_FILENAME,
    strategy: str = MEGA_EXTENT,
    writable_bytes: int = DEFAULT_WRITABLE_BYTES,
    parent: StrPath | None = None,
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
    """Make a volume, mount it on the directory ``target``; remove all at the end.

    ``contents`` answer ranges of the virtual file (offsets count from its start); other
    ranges give EIO. Sizes are bytes. ``strategy``, "mega-extent" or "fallocate", makes
    the seed. Images go to a temporary directory below ``parent``. ``front_end``,
    ``queues``, ``depth``, ``realtime``, ``cpus`` and ``ready_timeout_s`` are as for
    BlockServer, ``read_ahead_bytes`` as for sprout(). ``observe(stage, thing)`` is
    called at each stage: "seed" (a Seed), "server" (a BlockServer), "mapping" (a
    PhysicalMap), "sprout" (a Sprout).
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
