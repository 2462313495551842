"""NBD devices of the kernel's client, connected by nbd-client(8)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from btrfs_ublk.base.capabilities import ROOT, Program, require
from btrfs_ublk.base.ledger import Entry, Ledger, process_ledger, remover
from btrfs_ublk.base.process import run
from btrfs_ublk.kernel import blockdev
from btrfs_ublk.kernel.uevents import wait_until
from btrfs_ublk.units import BLOCK_BYTES

NBD_CLIENT = Program("nbd-client", "nbd-client")

_KIND = "nbd"
_TIMEOUT_S = 30.0
#: The server is on this machine: if it takes longer, it is dead.
_REQUEST_TIMEOUT_S = 30


@contextmanager
def connected_nbd(
    path: Path, server_socket: Path, *, ledger: Ledger | None = None
) -> Iterator[None]:
    """Connect an unused device to a server that listens on a Unix socket; disconnect it
    at the end of the block. Raises CommandError.
    """
    require(ROOT, NBD_CLIENT)
    ledger = ledger or process_ledger()
    with ledger.holding(_KIND, path=str(path)):
        run(
            [
                *("nbd-client", "-unix", server_socket, path),
                *("-block-size", str(BLOCK_BYTES)),
                *("-timeout", str(_REQUEST_TIMEOUT_S)),
            ],
            timeout_s=_TIMEOUT_S,
            keep_open_fds=[ledger.fileno()],
        )
        wait_until(
            lambda: _is_connected(path) and blockdev.size_bytes(path),
            timeout_s=_TIMEOUT_S,
            what=f"{path} has no size",
        )
        yield


def _is_connected(path: Path) -> bool:
    """Whether it is connected: the kernel then shows by whom (drivers/block/nbd.c)."""
    return Path("/sys/block", path.name, "pid").exists()


@remover(_KIND)
def _disconnect(entry: Entry) -> bool:
    path = Path(entry.details["path"])
    if not _is_connected(path):
        return False
    run(["nbd-client", "-d", path], timeout_s=_TIMEOUT_S)
    wait_until(
        lambda: not _is_connected(path),
        timeout_s=_TIMEOUT_S,
        what=f"{path} is still connected",
    )
    return True
