"""One suite per module, in ``SUITE``; see ``btrfs_ublk.bench.suite``."""
