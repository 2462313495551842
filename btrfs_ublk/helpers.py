"""Where the C helpers are. They are private to the package and not on PATH."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.process import run

#: Names a directory that is asked first: a sanitizer build, or stand-ins in tests.
HELPERS_VARIABLE = "BTRFS_UBLK_HELPERS"

_VERSION_TIMEOUT_S = 20.0

MKSEED = "btrfs-ublk-mkseed"
CHECKSEED = "btrfs-ublk-checkseed"
SERVER = "btrfs-ublk-server"
CACHE = "btrfs-ublk-cache"
MAP_PHYSICAL = "btrfs-ublk-map-physical"
RESHAPE = "btrfs-ublk-reshape"
MAKE_FILES = "btrfs-ublk-make-files"
VERIFY_READS = "btrfs-ublk-verify-reads"
MEASURE_MAP = "btrfs-ublk-measure-map"
FUSE_STAND_IN = "btrfs-ublk-fuse-stand-in"
#: All of them.
HELPERS = (
    *(MKSEED, CHECKSEED, SERVER, CACHE, MAP_PHYSICAL, RESHAPE),
    *(MAKE_FILES, VERIFY_READS, MEASURE_MAP, FUSE_STAND_IN),
)


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


def check_helper(name: str) -> Path:
    """helper_path(), of a helper that starts. Raises CapabilityError as well when this
    machine lacks a library of it, and CommandError when it does not start otherwise.
    """
    path = helper_path(name)
    run([path, "--version"], timeout_s=_VERSION_TIMEOUT_S)
    return path
