"""A process that waits for the end of another one, and removes what that left.

A process that is killed (SIGKILL, os._exit(), as by pytest-timeout's threads and by the
workers of pytest-xdist that lost their session) cannot take down what it made. Its
guardian does: it has the other end of a pipe, which closes with its last user.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from btrfs_ublk.ledger import Ledger

_STOP_TIMEOUT_S = 10.0
_NOTHING_TO_DO = b"."


@contextmanager
def guarded(ledger: Ledger) -> Iterator[None]:
    """Should this process end within the block, what the ledger lists is removed."""
    from btrfs_ublk.process import launch

    reader, writer = (open(fd, mode, 0) for fd, mode in zip(os.pipe(), ("rb", "wb")))
    with writer:
        with reader:
            module = "btrfs_ublk.testing.guardian"
            argv = [sys.executable, "-m", module, str(ledger.path)]
            child = launch(argv, stdin=reader, death_signal=None)
        try:
            yield
            writer.write(_NOTHING_TO_DO)
        finally:
            writer.close()
            child.stop(timeout_s=_STOP_TIMEOUT_S, signum=None)
            child.close()


def main(path: Path) -> None:
    if sys.stdin.buffer.read(1) == _NOTHING_TO_DO:
        return
    # Not before: it is in nobody's way until then.
    import btrfs_ublk.resources  # noqa: F401  (so that their kinds are known)
    import btrfs_ublk.server  # noqa: F401
    from btrfs_ublk.abandoned import abandoned_ledgers

    with closing(abandoned_ledgers(path.parent)) as ledgers:
        for ledger in ledgers:
            if ledger.path == path:
                ledger.sweep()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
