"""Sealed images: what they are, where they come from, and who may bring them."""

from typing import TYPE_CHECKING

from btrfs_ublk.base.exports import exporter

if TYPE_CHECKING:
    from btrfs_ublk.image.access import RegistryAccess, RegistryError
    from btrfs_ublk.image.build import BuildOptions, BuiltImage, build_image
    from btrfs_ublk.image.check import CheckReport, check_image
    from btrfs_ublk.image.commit import CommittedImage
    from btrfs_ublk.image.convert import ConvertedImage, convert_image
    from btrfs_ublk.image.documents import CHECKSUMS, COMPRESSIONS, Compression
    from btrfs_ublk.image.first import traced_ranges
    from btrfs_ublk.image.indexed import IndexedImage, index_image
    from btrfs_ublk.image.layout import Layout
    from btrfs_ublk.image.policy import RefusedImageError, read_policy
    from btrfs_ublk.image.pull import (
        ImageReport,
        PulledImage,
        inspect_image,
        pull_image,
    )
    from btrfs_ublk.image.reference import (
        LayoutName,
        Reference,
        parse_layout,
        parse_name,
        parse_reference,
        parse_repository,
        parse_source,
    )
    from btrfs_ublk.image.repository import Repository
    from btrfs_ublk.image.store import ImageStore, StoredImage
    from btrfs_ublk.image.transfer import Pushed, open_repository, push_image, walk
    from btrfs_ublk.image.tree import (
        Difference,
        DiffReport,
        ExportReport,
        check_layers,
        diff_images,
        export_image,
    )
else:
    __getattr__ = exporter(__name__, __file__)
