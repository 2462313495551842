"""Lazy data-block materialisation for btrfs."""

__version__ = "0.1.0"
