"""Help for tests of kept volumes: directories for them, and content to fetch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE
from btrfs_ublk.image.store import IMAGES_VARIABLE
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.units import GIB, KIB, MIB
from btrfs_ublk.volume import VolumeDefinition, VolumeFile, down_volume, show_volume
from btrfs_ublk.volume.down import is_anything_up
from btrfs_ublk.volume.store import VOLUMES_VARIABLE, volume_directory

NAME = "kept"
#: Time for a command, in a busy, emulated machine.
TIMEOUT_S = 240.0
#: This is not a whole number of blocks.
CONTENT_BYTES = 3 * MIB + 77


def image_place(
    root: Path, monkeypatch: pytest.MonkeyPatch, front_end: FrontEndName = "fuse"
) -> Place:
    """Return a place for volumes of images, whose store and policy are there, too."""
    monkeypatch.setenv(IMAGES_VARIABLE, str(root / "images"))
    monkeypatch.setenv(CONFIG_VARIABLE, str(root / "etc"))
    return Place(root, front_end)


@dataclass(frozen=True)
class Place:
    """A test's directories: volumes, mount point, and files to fetch."""

    root: Path
    front_end: FrontEndName

    @property
    def base(self) -> Path:
        return self.root / "volumes"

    @property
    def target(self) -> Path:
        return self.root / "mnt"

    def content(self, name: str) -> Path:
        """Return a file to fetch. The first call makes it."""
        path = self.root / name
        if not path.exists():
            path.write_bytes(os.urandom(CONTENT_BYTES))
        return path

    def definition(self, *names: str, **changes: Any) -> VolumeDefinition:
        """Define a volume with these files in its directory ``dir``."""
        files = [VolumeFile.parse(f"dir/{name}={self.content(name)}") for name in names]
        made = VolumeDefinition(
            size_bytes=GIB,
            writable_bytes=256 * MIB,
            mount=self.target,
            front_end=self.front_end,
            read_ahead_bytes=64 * KIB,
            files=tuple(files),
        )
        return replace(made, **changes)

    def matches(self, name: str) -> bool:
        """Return whether the volume's file has the content that was to be fetched."""
        found = (self.target / "dir" / name).read_bytes()
        return found == self.content(name).read_bytes()

    def state(self) -> str:
        return show_volume(NAME, base=self.base).state

    def command(
        self,
        *arguments: object,
        before: Sequence[str] = (),
        noun: str = "volume",
        verbose: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``btrfs-ublk volume …``, or another noun, behind the words ``before``."""
        return subprocess.run(
            [*before, sys.executable, "-m", "btrfs_ublk.cli.main"]
            + ["-vv"] * verbose
            + [noun]
            + [str(argument) for argument in arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, VOLUMES_VARIABLE: str(self.base)},
        )

    def told(self, *arguments: object) -> str:
        """Return whatever a command prints, with all that it logs."""
        done = self.command(*arguments[1:], noun=f"{arguments[0]}", verbose=True)
        return done.stdout + done.stderr

    def answer(self, *arguments: str | Path) -> Any:
        """Return the JSON that a command prints, whatever its exit status."""
        done = self.command(*arguments, "--json")
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def take_all_down(self) -> None:
        """Take all volumes down. One that a failed test left would make others fail."""
        for path in self.base.glob("[!.]*"):
            if is_anything_up(volume_directory(path.name, self.base)):
                down_volume(path.name, base=self.base)
