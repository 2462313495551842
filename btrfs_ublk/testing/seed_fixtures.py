"""Fixtures: images of seeds. They need no privileges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from btrfs_ublk.testing.factory import (
    Factory,
    factory_for_each_scope,
    one_for_each_scope,
)

if TYPE_CHECKING:
    from btrfs_ublk.seed import Seed

_SIZE_BYTES = 1 << 40


class SeedFactory(Factory["Seed"]):
    """``make(virtual_data_size)``: a Seed, whose image is at ``path``."""

    def default(self) -> Seed:
        """A Seed of 1 TiB of virtual data; its image, metadata only, is at ``path``."""
        return self()

    def __call__(
        self,
        virtual_data_size: int = _SIZE_BYTES,
        *,
        virtual_data_filename: str | None = None,
        strategy: str = "mega-extent",
        metadata_only: bool = True,
    ) -> Seed:
        """Without ``metadata_only``, the image is sparse and as large as the device,
        which the file system must support. See make_seed() for errors.
        """
        from btrfs_ublk.seed import make_seed_by

        path = self.directory() / "seed.img"
        with self.capabilities():
            return make_seed_by(
                strategy,
                path,
                virtual_data_size=virtual_data_size,
                virtual_data_filename=virtual_data_filename,
                metadata_only=metadata_only or None,
            )


btrfs_ublk_seed, btrfs_ublk_seed_module, btrfs_ublk_seed_session = one_for_each_scope(
    SeedFactory
)
(
    btrfs_ublk_seed_factory,
    btrfs_ublk_seed_factory_module,
    btrfs_ublk_seed_factory_session,
) = factory_for_each_scope(SeedFactory)
