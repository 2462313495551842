"""Contests of other things than reading by fio; see ``btrfs_ublk.bench.contest``."""
