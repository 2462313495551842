"""What has to live when memory is short: without privileges, on files of our own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from btrfs_ublk.device import endurance


@pytest.mark.parametrize(
    ("before", "after"), [("0\n", "-900"), ("500\n", "-900"), ("-950\n", "-950\n")]
)
def test_the_oom_killer_is_never_attracted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    score = tmp_path / "oom_score_adj"
    score.write_text(before)
    monkeypatch.setattr(endurance, "_OOM_SCORE", score)
    endurance._avoid_oom_killer()
    assert score.read_text() == after


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_an_oom_score_that_must_not_be_lowered(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", refuse)
    endurance._avoid_oom_killer()
