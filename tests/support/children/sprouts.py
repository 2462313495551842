"""Makes a sprout for each line that it reads, in a process and a process group of its
own, which may be killed.

Argument: a directory for everything. Prints the number of that process when it begins
to add the device, how many seconds that took, and, when the process has ended, "ended".
"""

import os
import sys
import time
from pathlib import Path

from btrfs_ublk.base.ledger import Ledger, process_ledger
from btrfs_ublk.kernel import loop_device, tempdir
from btrfs_ublk.kernel.btrfs import add_device
from btrfs_ublk.seed import make_seed
from btrfs_ublk.volume import sprout as module


def announced(target: Path, device: Path, *, ledger: Ledger | None = None) -> None:
    print(os.getpid(), flush=True)
    start_s = time.monotonic()
    add_device(target, device, ledger=ledger)
    print(time.monotonic() - start_s, flush=True)


def cycle(parent: Path) -> None:
    with tempdir(parent=parent) as directory:
        target = directory / "mnt"
        target.mkdir()
        seed = make_seed(
            directory / "seed.img", virtual_data_size=1 << 30, metadata_only=False
        )
        with loop_device(seed.path, read_only=True) as device:
            with module.sprout(device.path, target, parent=directory):
                pass


def main() -> None:
    module.add_device = announced
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)
            try:
                cycle(Path(sys.argv[1]))
            finally:
                process_ledger().close()
                os._exit(0)
        os.waitpid(pid, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
