"""Find the C helpers, which are private to the package and not on PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from btrfs_ublk.base.process import run
from btrfs_ublk.errors import CapabilityError

#: Names a directory to use instead: a sanitizer build, or stand-ins in tests.
HELPERS_VARIABLE = "BTRFS_UBLK_HELPERS"

_VERSION_TIMEOUT_S = 20.0

MKSEED = "btrfs-ublk-mkseed"
MKIMAGE = "btrfs-ublk-mkimage"
READIMAGE = "btrfs-ublk-readimage"
SEED = "btrfs-ublk-seed"
SERVER = "btrfs-ublk-server"
FETCH = "btrfs-ublk-fetch"
KEEPER = "btrfs-ublk-keeper"
CACHE = "btrfs-ublk-cache"
CODEC = "btrfs-ublk-codec"
MAP_PHYSICAL = "btrfs-ublk-map-physical"
ADD_DEVICE = "btrfs-ublk-add-device"
VERIFY_READS = "btrfs-ublk-verify-reads"
GET_RANGES = "btrfs-ublk-get-ranges"
HELPERS = (
    *(MKSEED, SEED, SERVER, KEEPER, CACHE, MAP_PHYSICAL, ADD_DEVICE),
    *(MKIMAGE, READIMAGE, FETCH),
    *(VERIFY_READS, GET_RANGES, CODEC),
)


def helper_path(name: str) -> Path:
    """Return the path of a helper in ``$BTRFS_UBLK_HELPERS``, else in the package.

    Raises CapabilityError, which says how to build it, when it is not there.
    """
    directory = os.environ.get(HELPERS_VARIABLE)
    if directory:
        path = Path(directory) / name
        hint = f"unset {HELPERS_VARIABLE}, or build the helpers there"
    else:
        hint = "build it: pip install . (or, in a checkout, pip install -e .)"
        path = Path(__file__).parents[1] / "libexec" / name
        if not path.is_file():
            path = _in_build_directory(name)
            if not path.is_file():
                raise CapabilityError(f"the helper {name} is not built", hint=hint)
    if not path.is_file():
        raise CapabilityError(f"the helper {name} is not at {path}", hint=hint)
    if not os.access(path, os.X_OK):
        raise CapabilityError(f"{path} is not executable", hint=f"chmod +x {path}")
    return path.absolute()


def _in_build_directory(name: str) -> Path:
    """Return a helper's path in a checkout, where meson-python builds it."""
    build = f"build/cp{sys.version_info.major}{sys.version_info.minor}"
    return Path(__file__).resolve().parents[2] / build / "csrc/tools" / name


def check_helper(name: str) -> Path:
    """Return helper_path(), and check that the helper starts. Also raises
    CapabilityError when a library that it needs is missing, and CommandError when it
    does not start for another reason."""
    path = helper_path(name)
    run([path, "--version"], timeout_s=_VERSION_TIMEOUT_S)
    return path
