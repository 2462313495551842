"""What earlier versions have written is read, and what newer ones have is refused.

The archives in fixtures/formats/ were written by the programs of the commits that their
names have. A volume is all that `volume up` and `down` have left, with a file that was
written and one of virtual data; a device is what a running one has in /run.
"""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.needs import Need
from support.paths import TESTS
from support.shells import pattern

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.volume import down_volume, up_volume
from btrfs_ublk.volume.store import volume_directory

FORMATS = TESTS / "support/formats"


def unpack(name: str, directory: Path) -> None:
    with tarfile.open(FORMATS / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="tar")  # with the modes that it has


@pytest.mark.fuse
@pytest.mark.parametrize("commit", ["46cece7", "9e50625"])
def test_a_volume(need: Need, sparse_path: Path, commit: str) -> None:
    need(ROOT, BTRFS, LOOP, FUSE)
    unpack(f"volume-{commit}", sparse_path)
    base = sparse_path / "volumes"
    base.chmod(0o700)
    definition = volume_directory("old", base).definition()
    definition = replace(definition, mount=sparse_path / "mnt")
    mount = sparse_path / "mnt"
    up_volume("old", definition, base=base)
    try:
        assert (mount / "written").read_text() == "written by an earlier version\n"
        assert (mount / "virtual").read_bytes() == pattern(131072)
        (mount / "new").write_text("written by this version\n")
    finally:
        down_volume("old", base=base)
    up_volume("old", definition, base=base)
    try:
        assert (mount / "new").read_text() == "written by this version\n"
    finally:
        down_volume("old", base=base)
