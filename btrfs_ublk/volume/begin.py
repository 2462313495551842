"""Bringing a volume up begins here: a daemon starts, and the registry of its image is
asked, before the modules are imported that need both (up.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, require
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.volume.store import (
    find_definition,
    remove_halves,
    volume_directory,
    volumes_directory,
)

if TYPE_CHECKING:
    from btrfs_ublk.content.oci import Resolved
    from btrfs_ublk.image.policy import Policy
    from btrfs_ublk.image.reference import Reference
    from btrfs_ublk.volume.definition import VolumeDefinition
    from btrfs_ublk.volume.report import KeptVolume


def up_volume(
    name: str,
    definition: VolumeDefinition | None = None,
    *,
    base: StrPath | None = None,
    made: Callable[[], object] | None = None,
    resolved: Callable[[str, str], object] | None = None,
    files: bool = True,
) -> KeptVolume:
    """Mount a volume with all files and trees of its definition (None: of that which
    find_definition() chooses); it outlives this process. A volume that is already up
    gets what is new in the definition.

    Its data are in a directory in ``base`` (None: what BTRFS_UBLK_VOLUMES_DIR names, or
    /var/lib/btrfs-ublk/volumes), and survive down_volume() and reboots. ``made`` is
    called when all is done, with signals deferred; ``resolved`` with each image whose
    tag was resolved to a digest, which is kept from then on. Without ``files``, these
    are only counted in what is returned.

    Raises UsageError for a definition that does not fit the existing volume,
    CapabilityError, BtrfsUblkError. What was made for this is undone then.
    """
    return bring_up(
        name, definition, base=base, made=made, resolved=resolved, files=files
    )


def bring_up(
    name: str,
    definition: VolumeDefinition | None = None,
    *,
    base: StrPath | None = None,
    made: Callable[[], object] | None = None,
    resolved: Resolved | None = None,
    files: bool = True,
    policy: Policy | None = None,
    listed_in: Reference | None = None,
) -> KeptVolume:
    """Do as up_volume() does; ``policy`` and ``listed_in`` are of the image of a new
    volume, see pulling()."""
    require(ROOT, BTRFS, LOOP)
    if definition is None:
        definition = find_definition(name, base=base).definition
    volumes_directory(base, make=True)
    volume = volume_directory(name, base)
    remove_halves(volume.path.parent)
    # Others are asked before anything is locked.
    with ExitStack() as held:
        image = None
        is_new = not os.path.lexists(volume.path)
        if definition.image and (is_new or volume.is_pending()):
            with deferred():
                # Most volumes need none of it.
                from btrfs_ublk.volume.image_seed import beginning_image
            image = held.enter_context(
                beginning_image(definition, policy=policy, listed_in=listed_in)
            )
        with deferred():
            from btrfs_ublk.supervision.client import daemon_starting
        held.enter_context(daemon_starting())
        with deferred():
            from btrfs_ublk.volume.up import finish_up
        return finish_up(
            volume, definition, image, made=made, resolved=resolved, files=files
        )
