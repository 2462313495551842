"""Helpers of the package that cannot be loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from btrfs_ublk.base.helpers import (
    CHECKSEED,
    HELPERS_VARIABLE,
    MKSEED,
    SERVER,
    helper_path,
)


@pytest.fixture
def of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two helpers that need a version of a library that nobody has; another not."""
    for name in (MKSEED, SERVER, CHECKSEED):
        shutil.copy(helper_path(name), tmp_path)
        if name != CHECKSEED:
            program = (tmp_path / name).read_bytes()
            assert program.count(b"\0libjansson.so.4\0") == 1
            other = program.replace(b"\0libjansson.so.4\0", b"\0libjansson.so.7\0")
            (tmp_path / name).write_bytes(other)
    monkeypatch.setenv(HELPERS_VARIABLE, str(tmp_path))
