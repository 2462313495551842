"""A process that waits for another one's end, and removes what that left.

A process that is killed (by SIGKILL or os._exit(), as pytest-timeout's threads and
pytest-xdist's orphaned workers do) cannot remove what it made, nor can one that itself
has files of it open. Its guardian does: it has the other end of a pipe, which closes
with its last user.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from btrfs_ublk.base.log import log

if TYPE_CHECKING:
    from btrfs_ublk.base.ledger import Ledger
    from btrfs_ublk.base.process import Child

_STOP_TIMEOUT_S = 10.0
_NOTHING_TO_DO = b"."
#: Guardians that start when this process ends, and the pipes that tell them.
_heirs: list[tuple[Child, int]] = []


@contextmanager
def guarded(ledger: Ledger) -> Iterator[None]:
    """Remove what the ledger lists if this process ends within the block. What is still
    listed after the block is removed when this process ends.
    """
    from btrfs_ublk.base.process import launch

    reader, writer = (open(fd, mode, 0) for fd, mode in zip(os.pipe(), ("rb", "wb")))
    with writer:
        with reader:
            module = "btrfs_ublk.testing.guardian"
            argv = [sys.executable, "-m", module, str(ledger.path)]
            child = launch(argv, stdin=reader, death_signal=None)
        try:
            yield
            if ledger.entries():
                # NB: only the kernel closes this descriptor, when the process ends.
                _heirs.append((child, os.dup(writer.fileno())))
                atexit.register(_hand_over, ledger)
            else:
                writer.write(_NOTHING_TO_DO)
        finally:
            writer.close()
            if not any(heir is child for heir, _ in _heirs):
                child.stop(timeout_s=_STOP_TIMEOUT_S, signum=None)
                child.close()


def _hand_over(ledger: Ledger) -> None:
    """Remove what is left at exit, but for what this process still uses."""
    left = [x for x in ledger.close(quietly=True) if x.result == "left"]
    if left:
        reason = (left[0].reason or "").partition("\n")[0]
        log.warning(
            "btrfs-ublk: %d things are taken down after the end of this process, as %s;"
            " what cannot go then either is removed by: btrfs-ublk gc",
            len(left),
            reason,
        )


def main(path: Path) -> None:
    if sys.stdin.buffer.read(1) == _NOTHING_TO_DO:
        return
    # Imported late, so that a waiting guardian costs little.
    from btrfs_ublk.base.dead_ledgers import abandoned_ledgers
    from btrfs_ublk.base.gc import learn_kinds

    with closing(abandoned_ledgers(path.parent)) as ledgers:
        for ledger in ledgers:
            if ledger.path == path:
                learn_kinds(ledger.entries)
                ledger.sweep()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
