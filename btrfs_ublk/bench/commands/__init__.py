"""``btrfs-ublk bench NAME``: one file each, with a click command named ``command``."""
