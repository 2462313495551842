"""Opens what holds images, by its name."""

from __future__ import annotations

from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.reference import Reference
from btrfs_ublk.image.repository import Repository


def open_repository(
    reference: Reference, access: RegistryAccess, *, writing: bool = False
) -> Repository:
    """Return the repository that a reference names, to read, or to write as well.
    Raises UsageError."""
    if reference.is_in_registry:
        from btrfs_ublk.image.registry import RegistryRepository

        return RegistryRepository(reference, access, writing=writing)
    from btrfs_ublk.image.stored_layout import StoredLayout

    return StoredLayout(reference, access, writing=writing)
