"""``btrfs-ublk prefetch`` and ``trace``, as far as they need no device."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from btrfs_ublk.cli.trace import command as trace
from btrfs_ublk.errors import BtrfsUblkError

NAME = "prefetched"


class Client:
    """Of a map from which nobody reads anything."""

    def __init__(self) -> None:
        self.stopped = 0

    def trace_start(self, *, limit: int | None) -> tuple[int, int]:
        return 7, 4096

    def trace_read(self, number: int, at: int, *, stop: bool = False) -> dict[str, Any]:
        if self.stopped:
            raise BtrfsUblkError("the recording is over")
        self.stopped += stop
        return {"reads": [], "units": 0, "lost": 0, "seconds": 0.5}


@pytest.mark.parametrize(
    ("output", "says", "status"),
    [
        ("/dev/full", "/dev/full: No space left", 1),
        ("/no/such", "/no/such: No such file", 2),
    ],
)
def test_a_trace_without_room(
    monkeypatch: pytest.MonkeyPatch, output: str, says: str, status: int
) -> None:
    """Of what could not be begun, the caller's path is to blame."""
    client = Client()
    monkeypatch.setattr("btrfs_ublk.cli.trace.device_map", lambda *_, **__: client)
    argv = ["record", NAME, "-o", output, "--for", "0.01"]
    done = CliRunner().invoke(trace, argv, standalone_mode=False)
    error = done.exception
    assert isinstance(error, BtrfsUblkError) and str(error).startswith(says)
    assert (error.exit_status, client.stopped) == (status, 1)
