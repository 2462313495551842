"""What a maintainer needs to know of this machine, without its secrets."""

from btrfs_ublk.ops.bugreport.archive import Entry, write_report

__all__ = ["Entry", "write_report"]
