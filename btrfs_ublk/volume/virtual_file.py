"""The file of all virtual data in a mounted seed or sprout."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from btrfs_ublk import physmap
from btrfs_ublk import seed as seeds
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.kernel.btrfs import reached_inode


def virtual_file_of(seed: seeds.Seed, target: StrPath) -> AbstractContextManager[Path]:
    """Yield a path of a seed's virtual file, valid within the block, to clone from.

    ``target`` is where the seed, or a sprout of it, is mounted. The file is in no
    directory, as programs that walk a tree would read all of it. Raises BtrfsUblkError;
    needs root.
    """
    return reached_inode(target, seed.virtual_data.inode)


def assert_mapping(seed: seeds.Seed, target: Path) -> physmap.PhysicalMap:
    """Prove that the kernel maps the virtual file to where the server answers it.

    ``target`` is where the seed is mounted. Raises MappingError, which names the row
    and the rule, when any byte of the file would be read from elsewhere, which would be
    silent corruption.
    """
    virtual = seed.virtual_data
    with virtual_file_of(seed, target) as path:
        mapping = physmap.PhysicalMap.read(path)
    virtual.assert_matches(mapping)
    return mapping
