"""``python -m btrfs_ublk.device.supervise``, which supervisors in the foreground, also
those of earlier versions, execute when they are replaced."""

import sys

from btrfs_ublk.supervision.supervisor import main

if __name__ == "__main__":
    sys.exit(main())
