"""A lazy volume: seed, block server, sprout and mount as one thing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.ledger import Ledger, process_ledger
from btrfs_ublk.base.log import step
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.content import Source
from btrfs_ublk.errors import UsageError
from btrfs_ublk.kernel.beneath import opened_directory
from btrfs_ublk.kernel.reflink import clone_beneath
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.seed import DEFAULT_FILENAME, MEGA_EXTENT, Seed, make_seed_by
from btrfs_ublk.server.block_server import READY_TIMEOUT_S, BlockServer
from btrfs_ublk.server.description import LazySegment, Segment
from btrfs_ublk.server.names import FrontEndName
from btrfs_ublk.units import TIB
from btrfs_ublk.volume.definition import (
    DEFAULT_READ_AHEAD_BYTES,
    DEFAULT_WRITABLE_BYTES,
)
from btrfs_ublk.volume.entry import VolumeFile, source_of
from btrfs_ublk.volume.files import Clone, make_clones, map_files
from btrfs_ublk.volume.sprout import Sprout, assert_mapping, sprout
from btrfs_ublk.volume.sprout import virtual_file_of as virtual_file_of


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
            with opened_directory(self.target) as top, self.virtual_file() as virtual:
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

    def add_files(self, files: Mapping[str, str | Source]) -> None:
        """Make files that are fetched when they are read, and directories for them:
        ``files`` are paths in the volume, and where their bytes are, a URL or a Source.

        They are mapped in the volume's LazySegment. Raises UsageError for a file that
        exists or cannot be, Refused for a source that does not answer.
        """
        made = map_files(self.server.map(), _entries(files))
        clones = [Clone(x.path, x.offset, x.size_bytes) for x in made]
        with opened_directory(self.target) as top, self.virtual_file() as virtual:
            make_clones(virtual, top, clones, [])


@contextmanager
def volume(
    target: StrPath,
    contents: Sequence[Segment] | None = None,
    *,
    files: Mapping[str, str | Source] | None = None,
    virtual_data_size: int | None = None,
    virtual_data_filename: str = DEFAULT_FILENAME,
    strategy: str = MEGA_EXTENT,
    writable_bytes: int = DEFAULT_WRITABLE_BYTES,
    parent: StrPath | None = None,
    front_end: FrontEndName = "auto",
    queues: int | None = None,
    depth: int | None = None,
    read_ahead_bytes: int | None = DEFAULT_READ_AHEAD_BYTES,
    ready_timeout_s: float = READY_TIMEOUT_S,
    observe: Callable[[str, object], None] = lambda stage, thing: None,
    ledger: Ledger | None = None,
) -> Iterator[Volume]:
    """Make a volume, mount it on the directory ``target``; remove all at the end.

    ``contents`` answer ranges of the virtual file (offsets count from its start); other
    ranges give EIO. Sizes are bytes; ``virtual_data_size`` is by default up to the end
    of ``contents``. ``files`` are as for add_files(); without ``contents``, there is
    one LazySegment of 1 TiB, whose map and cache go as well. ``strategy``,
    "mega-extent" or "fallocate", makes the seed. Images go to a temporary directory
    below ``parent``. ``front_end``, ``queues``, ``depth`` and
    ``ready_timeout_s`` are as for BlockServer, ``read_ahead_bytes`` as for sprout().
    ``observe(stage, thing)`` is called at each stage: "seed" (a Seed), "server" (a
    BlockServer), "mapping" (a PhysicalMap), "sprout" (a Sprout). Raises UsageError for
    files or contents that cannot be, Refused for a source that does not answer.
    """
    ledger = ledger or process_ledger()
    _entries(files or {})  # nothing is made where they are wrong
    with ExitStack() as stack:
        directory = stack.enter_context(tempdir(parent=parent, ledger=ledger))
        if contents is None:
            contents = [
                LazySegment(
                    offset=0,
                    length=virtual_data_size or TIB,
                    map=directory / "map",
                    cache=directory / "cache",
                )
            ]
        if virtual_data_size is None:
            virtual_data_size = max((one.end for one in contents), default=TIB)
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
        made = Volume(seed, server, grown)
        if files:
            made.add_files(files)
        yield made


def _entries(files: Mapping[str, str | Source]) -> list[VolumeFile]:
    return [
        VolumeFile(name, source_of(at) if isinstance(at, str) else dict(at))
        for name, at in files.items()
    ]
