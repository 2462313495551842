"""The command that gets what is missing, on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress

from btrfs_ublk.bench.commands.report import PythonPackage
from btrfs_ublk.bench.fio import Fio
from btrfs_ublk.capabilities import (
    UBLK,
    Capability,
    Helper,
    Program,
    Root,
    checkout,
)
from btrfs_ublk.doctor.access import CERTIFICATES, VIRTIOFSD
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.helpers import helper_path

#: Where Fedora has another name for a package of Debian's.
_FEDORA = {"mount": "util-linux-core", "qemu-system-x86": "qemu-system-x86-core"}


def command_for(capability: Capability) -> str | None:
    """To be copied; None where no command does it, and ``cure`` has to do."""
    match capability:
        case Program(package=package):
            return _install(package.split()[0])
        case Fio():
            return _install("fio")
        case Helper(helper=name) if _is_built(name):
            return None  # it lacks a library, and the cure says which
        case Helper():
            return "scripts/setup --build" if checkout() else None
        case PythonPackage(name=name):
            if checkout():
                return "scripts/setup --bench"
            return f"{sys.executable} -m pip install {name}"
        case Root():
            return f"sudo {_this_program()} doctor"
    if capability is CERTIFICATES:
        return _install("ca-certificates")
    if capability is VIRTIOFSD:
        # Debian 12 has it in QEMU's package, which says so; later ones by that name.
        return "scripts/setup --vm" if checkout() else _install("virtiofsd")
    if capability == UBLK and checkout():
        return "scripts/vm -- .venv/bin/btrfs-ublk doctor"
    return None


def _this_program() -> str:
    """It need not be on PATH, and sudo has another one."""
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
        return f"{sudo}dnf install {_FEDORA.get(package, package)}"
    return None
