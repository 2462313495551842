"""What can be seen only by trying: whether this user may use what the kernel has."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.capabilities import DeviceNode
from btrfs_ublk.device.state import devices_directory
from btrfs_ublk.directories import check_private
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.ledger import STATE_DIRECTORIES

_CAP_SYS_ADMIN = 21  # linux/capability.h
#: Where distributions have them, if not where Python's OpenSSL looks.
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
)
#: As scripts/vm looks for it: Debian 13's and Fedora's, and Debian 12's.
_VIRTIOFSD = (
    *("/usr/libexec/virtiofsd", "/usr/lib/virtiofsd"),
    "/usr/lib/qemu/virtiofsd",
)


class Unseen(Exception):
    """This user may not look; the message says what it takes."""


@dataclass(frozen=True)
class Openable:
    """A device node that may be opened: containers often have it, and may not. Raises
    Unseen where it is root's business.
    """

    node: DeviceNode

    @property
    def name(self) -> str:
        return f"use of {self.node.path}"

    @property
    def cure(self) -> str:
        return f"in a container, pass it: --device {self.node.path}"

    def probe(self) -> str | None:
        try:
            os.close(os.open(self.node.path, os.O_RDWR | os.O_CLOEXEC))
        except FileNotFoundError:
            return None  # that is told, or it comes with its module
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM) and os.geteuid() != 0:
                raise Unseen(f"only root may open {self.node.path}") from None
            return f"{self.node.path} cannot be opened: {error.strerror}"
        return None


@dataclass(frozen=True)
class Condition:
    """Something that a function tells: None, or the reason why not."""

    name: str
    cure: str
    probe: Callable[[], str | None]


def _sys_admin() -> str | None:
    if os.geteuid() != 0:
        return None  # that root is missing is told
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff" and not int(value, 16) >> _CAP_SYS_ADMIN & 1:
            return "this root may not mount (CAP_SYS_ADMIN)"
    return None


def _directories() -> str | None:
    named = os.environ.get("BTRFS_UBLK_STATE_DIR")
    path = Path(named or STATE_DIRECTORIES[0])
    try:
        devices_directory()
        if path.exists():
            check_private(path, what="state directory", hint="")
    except (BtrfsUblkError, OSError) as error:
        if os.geteuid() != 0:
            raise Unseen("the directories are root's") from None
        return str(getattr(error, "message", error))
    return None


def _certificates() -> str | None:
    paths = ssl.get_default_verify_paths()
    known = (paths.cafile, paths.openssl_cafile, *_CERTIFICATES)
    if any(path and Path(path).is_file() for path in known):
        return None
    return "no file with certificates of authorities was found: https will fail"


def _vm_script() -> str | None:
    machine = platform.machine()
    return None if machine == "x86_64" else f"there is no VM on {machine} yet"


def _virtiofsd() -> str | None:
    found = shutil.which("virtiofsd") or any(map(os.path.exists, _VIRTIOFSD))
    return None if found else "it is not there"


SYS_ADMIN = Condition(
    "mounting", "in a container: --cap-add SYS_ADMIN, or --privileged", _sys_admin
)
DIRECTORIES = Condition(
    "directories that are root's alone",
    "chown root and chmod 0700 the directory, or remove it",
    _directories,
)
CERTIFICATES = Condition(
    "certificates", "install the package ca-certificates", _certificates
)
VM_SCRIPT = Condition("scripts/vm", "use an x86_64 machine", _vm_script)
VIRTIOFSD = Condition("virtiofsd", "install the package virtiofsd", _virtiofsd)
