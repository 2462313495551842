"""``python -m btrfs_ublk.daemon``"""

import os
import sys

if __name__ == "__main__":
    if "--detach" in sys.argv:
        # NB: before the imports: the command that starts this does not wait for them.
        if os.fork():
            os._exit(0)
        os.setsid()
    from btrfs_ublk.supervision.daemon import main

    sys.exit(main())
