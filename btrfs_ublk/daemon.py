"""``python -m btrfs_ublk.daemon``"""

import sys

from btrfs_ublk.supervision.daemon import main

if __name__ == "__main__":
    sys.exit(main())
