"""One family of peers per module, in ``PEERS``; see ``btrfs_ublk.bench.peer``."""
