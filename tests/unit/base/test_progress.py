"""Progress is for terminals only."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.images import sealed_image

from btrfs_ublk.image.pull import open_sealed


def _run(arguments: list[str], path: object, *, status: int = 0) -> tuple[str, str]:
    """stdout, and what came to stderr, which is a terminal."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "btrfs_ublk.cli.main", *arguments, str(path)],
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            timeout=60,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "300"},
        )
        assert done.returncode == status
        os.set_blocking(ours, False)
        said = b""
        with suppress(BlockingIOError):
            while True:  # a terminal gives 4 KiB at most at a time
                said += os.read(ours, 1 << 16)
        return done.stdout, said.decode()
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "content[red]"
    path.write_bytes(bytes(1 << 20))
    return path


def test_a_terminal_shows_it(path: Path) -> None:
    stdout, stderr = _run(["map", "digest"], path)
    assert "reading content[red]" in stderr and "1.0/1.0 MB" in stderr
    assert len(stdout) == 65


def test_a_pipe_gets_nothing(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "btrfs_ublk.cli.main", "map", "digest", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""


def test_bytes_whose_number_is_known_late(tmp_path: Path) -> None:
    made = sealed_image(tmp_path / "image")
    layout, manifest, _ = open_sealed(made.name)
    layout.blob(manifest.pack.digest).unlink()
    stdout, stderr = _run(["image", "check", "--no-btrfs-check"], made.name, status=1)
    assert f"check {made.name}" in stderr
    assert re.search(r"[\d.]+/[\d.]+ kB", stderr), stderr
    assert "pack sha256:" in stdout
