"""``btrfs-ublk prefetch`` and ``trace``, as far as they need no device."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from btrfs_ublk.cli.prefetch import command as prefetch
from btrfs_ublk.errors import UsageError

NAME = "prefetched"


@pytest.mark.parametrize("instead", ["--status", "--cancel"])
@pytest.mark.parametrize("words", ["--rate 1M", "--concurrency 2", "--no-wait"])
def test_refuses_what_would_do_nothing(instead: str, words: str) -> None:
    argv = [NAME, instead, *words.split()]
    done = CliRunner().invoke(prefetch, argv, standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert "for a prefetch that begins" in str(done.exception)
