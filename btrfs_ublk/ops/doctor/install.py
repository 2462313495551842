"""The commands that install what is missing on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress

from btrfs_ublk.base.capabilities import (
    ROOT,
    UBLK,
    Capability,
    Fio,
    Helper,
    Program,
    PythonPackage,
    checkout,
)
from btrfs_ublk.base.helpers import helper_path
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.ops.doctor.access import CERTIFICATES


def command_for(capability: Capability) -> str | None:
    """Return a command to copy; None where there is none but ``hint`` explains."""
    match capability:
        case Program(package=package):
            return _install(package.split()[0])
        case Fio():
            return _install("fio")
        case Helper(name=name) if _is_built(name):
            return None  # it lacks a library, which the hint names
        case Helper():
            return "scripts/setup --build" if checkout() else None
        case PythonPackage(package=str(package)):
            return _install(package)
        case PythonPackage(name=name, setup=setup):
            if checkout():
                return f"scripts/setup {setup}"
            return f"{sys.executable} -m pip install {name}"
    if capability is ROOT:
        return f"sudo {_this_program()} doctor"
    if capability is CERTIFICATES:
        return _install("ca-certificates")
    if capability == UBLK and checkout():
        return "scripts/vm -- .venv/bin/btrfs-ublk doctor"
    return None


def _this_program() -> str:
    """Return a path, since the program may not be on PATH, nor on sudo's."""
    name = "btrfs-ublk"
    called = sys.argv[0] if os.path.basename(sys.argv[0]) == name else name
    return shutil.which(called) or name


def _is_built(helper: str) -> bool:
    with suppress(CapabilityError):
        return bool(helper_path(helper))
    return False


def _install(package: str) -> str | None:
    sudo = "" if os.geteuid() == 0 else "sudo "
    if shutil.which("apt-get"):
        return f"{sudo}apt-get install {package}"
    if shutil.which("dnf"):
        return f"{sudo}dnf install {package}"
    return None
