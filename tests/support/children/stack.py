"""Builds and takes down seed, loop device and sprout again and again, until a signal.

Argument: a directory for everything. Prints a line per cycle.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from btrfs_ublk.base.signals import exit_status_of, interruptible
from btrfs_ublk.kernel import clone_file, loop_device, tempdir
from btrfs_ublk.seed import make_seed
from btrfs_ublk.volume.sprout import sprout
from btrfs_ublk.volume.temporary import virtual_file_of


def cycle(parent: Path) -> None:
    with tempdir(parent=parent) as directory:
        target = directory / "mnt"
        target.mkdir()
        seed = make_seed(directory / "seed.img", virtual_data_size=1 << 30)
        with loop_device(seed.path, read_only=True) as device:
            with sprout(device.path, target, parent=directory) as made:
                clone = made.target / "clone"
                with virtual_file_of(seed, made.target) as source:
                    clone_file(source, clone, source_offset=0, size_bytes=10000)
                (made.target / "file").write_bytes(bytes(100000))


def main() -> None:
    # Whoever runs the tests in the background may have it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent = Path(sys.argv[1])
    while True:
        print("cycle", flush=True)
        cycle(parent)


if __name__ == "__main__":
    try:
        with interruptible(exiting=True):
            main()
    except KeyboardInterrupt as error:
        sys.exit(exit_status_of(error))
