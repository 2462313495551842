"""Directories of kept volumes, and what is none: nobody else's is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from btrfs_ublk.volumes.make import remove_halves
from btrfs_ublk.volumes.store import VOLUMES_VARIABLE, VolumeDirectory

HALF = ".kept.0123456789abcdef"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv(VOLUMES_VARIABLE, str(tmp_path))
    return tmp_path


def test_only_halves_of_volumes_are_removed(base: Path) -> None:
    """The base may be any directory: somebody's home, say."""
    kept = [".ssh", ".git", ".x.abc", f"{HALF}0", f".{HALF}", HALF.upper()]
    for name in (*kept, HALF, ".a.b-c.0123456789abcdef", ".locked.0123456789abcdef"):
        (base / name / "sub").mkdir(parents=True)
    link = base / ".link.0123456789abcdef"
    link.symlink_to(base / ".ssh")
    with VolumeDirectory(base / ".locked.0123456789abcdef").locked(timeout_s=1) as lock:
        remove_halves(base)
        assert lock.fileno() >= 0
    left = {path.name for path in base.iterdir()}
    assert left == {*kept, link.name, ".locked.0123456789abcdef", ".lock"}
    assert all((base / name / "sub").is_dir() for name in kept)
