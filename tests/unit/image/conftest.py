"""Fixtures of tests of images."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def temporary(sparse_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where temporary files go by default: none may stay."""
    path = sparse_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    yield
    assert list(path.iterdir()) == []
