"""Where the C helpers are. They are private to the package and not on PATH."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from btrfs_ublk.errors import CapabilityError

#: Names a directory that is asked first: a sanitizer build, or stand-ins in tests.
HELPERS_VARIABLE = "BTRFS_UBLK_HELPERS"

MKSEED = "btrfs-ublk-mkseed"
CHECKSEED = "btrfs-ublk-checkseed"
SERVER = "btrfs-ublk-server"
MAP_PHYSICAL = "btrfs-ublk-map-physical"
RESHAPE = "btrfs-ublk-reshape"
MAKE_FILES = "btrfs-ublk-make-files"
VERIFY_READS = "btrfs-ublk-verify-reads"


def helper_path(name: str) -> Path:
    """The executable of that name, from ``$BTRFS_UBLK_HELPERS``, else from the package.

    Raises CapabilityError, which says how to build it, when it is not there.
    """
    directory = os.environ.get(HELPERS_VARIABLE)
    if directory:
        path = Path(directory) / name
        hint = f"unset {HELPERS_VARIABLE}, or build the helpers there"
    else:
        # In an editable install this is the file in meson's build directory.
        hint = "build it: pip install . (or, in a checkout, pip install -e .)"
        resource = files("btrfs_ublk") / "libexec" / name
        if not resource.is_file():
            raise CapabilityError(f"the helper {name} is not built", hint=hint)
        path = Path(str(resource))
    if not path.is_file():
        raise CapabilityError(f"the helper {name} is not at {path}", hint=hint)
    if not os.access(path, os.X_OK):
        raise CapabilityError(f"{path} is not executable", hint=f"chmod +x {path}")
    return path.absolute()
