"""One kind of peer per module, in ``PEERS``; see ``btrfs_ublk.bench.peer``."""
