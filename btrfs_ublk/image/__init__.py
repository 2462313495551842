"""Sealed images: what they are, where they come from, and who may bring them."""

from typing import TYPE_CHECKING

from btrfs_ublk.base.exports import exporter

if TYPE_CHECKING:
    from btrfs_ublk.image.access import RegistryAccess
    from btrfs_ublk.image.build import BuildOptions, build_image
    from btrfs_ublk.image.check import CheckReport, check_image
    from btrfs_ublk.image.convert import convert_image
    from btrfs_ublk.image.documents import CHECKSUMS, COMPRESSIONS, Compression
    from btrfs_ublk.image.first import push_trace, traced_ranges
    from btrfs_ublk.image.indexed import index_image
    from btrfs_ublk.image.layout import Layout
    from btrfs_ublk.image.pull import inspect_image, pull_image
    from btrfs_ublk.image.reference import (
        LayoutName,
        Reference,
        parse_layout,
        parse_name,
        parse_reference,
        parse_repository,
        parse_source,
    )
    from btrfs_ublk.image.store import ImageStore, StoredImage
    from btrfs_ublk.image.transfer import open_repository, push_image, walk
    from btrfs_ublk.image.tree import (
        Difference,
        check_layers,
        diff_images,
        export_image,
    )
else:
    __getattr__ = exporter(__name__, __file__)
