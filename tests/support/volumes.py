"""Kept volumes, and images with trees that tests fork, change and commit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from btrfs_ublk import server as servers
from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE
from btrfs_ublk.image.store import IMAGES_VARIABLE
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.units import GIB, KIB, MIB
from btrfs_ublk.volume import (
    FORK_MODES,
    ForkMode,
    VolumeDefinition,
    VolumeFile,
    down_volume,
    fork_image,
    show_volume,
    up_volume,
)
from btrfs_ublk.volume.device import find_device
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


#: Runs a statement, and is killed at the N-th call of a function.
_KILLED = """
import os, signal, sys
from importlib import import_module
from pathlib import Path, PosixPath
from btrfs_ublk import volume

step, call, statement = sys.argv[1:]
module, _, path = step.partition(":")
where, (*path, last) = import_module(f"btrfs_ublk.{module}"), path.split(".")
for part in path:
    where = getattr(where, part)
real, calls = getattr(where, last), []

def die(*arguments, **options):
    calls.append(1)
    if len(calls) == int(call):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)

setattr(where, last, die)
exec(statement)
"""


def killed_at(step: str, statement: str, *, call: int = 1) -> None:
    """Run a statement, which may use ``volume``, in a process that is killed at the
    N-th call of a function: one of a module, as in "volume.trees:_map"."""
    words = [sys.executable, "-c", _KILLED, step, str(call), statement]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == -signal.SIGKILL, (step, done.stderr)


CHANGED_BIG = random.Random(9).randbytes(4 * MIB)


def base_tree(root: Path) -> Path:
    """What the image has before anything changes."""
    tree = root / "tree"
    for name in ("etc/apt", "usr/lib/deep/er", "moved/inner", "replaced", "var"):
        (tree / name).mkdir(parents=True)
    (tree / "big").write_bytes(CHANGED_BIG)
    for name in ("etc/motd", "etc/gone", "usr/lib/deep/er/x", "moved/inner/y"):
        (tree / name).write_text(f"{name}\n")
    for name in ("replaced/old", "var/to-directory", "etc/apt/list", "etc/mode"):
        (tree / name).write_text(f"{name}\n")
    (tree / "linked").write_text("two names\n")
    os.link(tree / "linked", tree / "etc/linked-too")
    os.link(tree / "linked", tree / "third")
    (tree / "link").symlink_to("etc/motd")
    os.chown(tree / "etc", 7, 8)
    return tree


def change(one: Path, mode: ForkMode) -> None:
    """Change all that can be changed."""
    (one / "etc/motd").write_text("changed\n")
    (one / "etc/gone").unlink()
    (one / "new").mkdir(0o700)
    (one / "new/file").write_bytes(os.urandom(70 * KIB))
    os.link(one / "new/file", one / "usr/lib/second-name")
    os.setxattr(one / "new/file", "user.binary", bytes(range(256)))
    os.utime(one / "new/file", ns=(0, -1_250_000_000))
    os.mkfifo(one / "new/fifo")
    os.mknod(one / "new/device", 0o20640, os.makedev(5, 300))
    (one / "new/dangling").symlink_to("a" * 200)
    (one / os.fsdecode(b"new/\xff\xfe" + b"n" * 200)).write_text("not UTF-8")
    if mode == "snapshot":
        os.rename(one / "moved", one / "usr/moved-here")
    else:  # overlayfs answers EXDEV, and mv copies
        shutil.move(one / "moved", one / "usr/moved-here")
    (one / "usr/moved-here/inner/y").write_text("changed after the move\n")
    shutil.rmtree(one / "replaced")
    (one / "replaced").mkdir()
    (one / "replaced/new").write_text("another directory\n")
    (one / "var/to-directory").unlink()
    (one / "var/to-directory").mkdir()
    (one / "var/to-directory/x").write_text("x")
    shutil.rmtree(one / "etc/apt")
    (one / "etc/apt").write_text("a file now\n")
    (one / "etc/mode").chmod(0o4755)
    os.chown(one / "usr/lib", 1000, 3_000_000)
    os.rename(one / "linked", one / "linked-elsewhere")
    with open(one / "third", "a") as file:
        file.write("more\n")
    (one / "link").unlink()
    (one / "link").symlink_to("etc/mode")
    os.chmod(one, 0o711)


BIG = random.Random(7).randbytes(8 * MIB)

SMALL_FILES = 40

each_mode = pytest.mark.parametrize("mode", FORK_MODES)


def up(place: Place, image: str | None = None) -> None:
    if image is None:
        image = volume_directory(NAME, place.base).definition().image
    up_volume(NAME, place.definition(image=image), base=place.base)


def fork(
    place: Place, name: str, mode: ForkMode, quota_bytes: int | None = None
) -> Path:
    return fork_image(NAME, name, mode=mode, quota_bytes=quota_bytes, base=place.base)


def fetched_bytes(place: Place) -> int:
    device = find_device(volume_directory(NAME, place.base), ask=True)
    assert device is not None and device.stats is not None
    stats = servers.ServerStats.parse(device.stats)
    return sum(lazy.fetcher.bytes_fetched for lazy in stats.lazy)
