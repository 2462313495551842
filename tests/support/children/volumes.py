"""Brings volumes up and takes them down again and again, until a signal.

Arguments: a directory for everything, the front end. Prints a line per cycle.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.base.signals import exit_status_of, interruptible
from btrfs_ublk.kernel import tempdir
from btrfs_ublk.server import FrontEndName, PatternSegment
from btrfs_ublk.volume.temporary import volume

_SIZE = 1 << 40


def cycle(parent: Path, front_end: FrontEndName) -> None:
    pattern = PatternSegment(offset=0, length=_SIZE)
    with tempdir(parent=parent) as directory:
        target = directory / "mnt"
        target.mkdir()
        with volume(
            target,
            [pattern],
            virtual_data_size=_SIZE,
            parent=directory,
            front_end=front_end,
        ) as made:
            clone = made.clone("clone", offset=_SIZE // 2, size_bytes=10000)
            assert read_direct(clone, 0, 10000) == pattern.content(_SIZE // 2, 10000)
            (made.target / "file").write_bytes(bytes(100000))


def main() -> None:
    # Whoever runs the tests in the background may have it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent = Path(sys.argv[1])
    front_end: FrontEndName = "ublk" if sys.argv[2] == "ublk" else "fuse"
    while True:
        print("cycle", flush=True)
        cycle(parent, front_end)


if __name__ == "__main__":
    try:
        with interruptible(exiting=True):
            main()
    except KeyboardInterrupt as error:
        sys.exit(exit_status_of(error))
