"""Checks that need a try: whether this user may use what the kernel has."""

from __future__ import annotations

import errno
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.capabilities import DeviceNode
from btrfs_ublk.base.ledger import STATE_DIRECTORIES
from btrfs_ublk.base.private_dirs import check_private
from btrfs_ublk.device.state import devices_directory
from btrfs_ublk.errors import BtrfsUblkError

_CAP_SYS_ADMIN = 21  # linux/capability.h
#: Where distributions have certificates, if not where Python's OpenSSL looks.
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
)


class Unseen(Exception):
    """This user may not check; the message says what it takes."""


@dataclass(frozen=True)
class Openable:
    """A device node that this user can open, which containers often forbid. Raises
    Unseen when only root could tell.
    """

    node: DeviceNode

    @property
    def name(self) -> str:
        return f"use of {self.node.path}"

    @property
    def hint(self) -> str:
        return f"in a container, pass it: --device {self.node.path}"

    def probe(self) -> str | None:
        try:
            os.close(os.open(self.node.path, os.O_RDWR | os.O_CLOEXEC))
        except FileNotFoundError:
            return None  # the node's own check reports it, or its module makes it
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM) and os.geteuid() != 0:
                raise Unseen(f"only root may open {self.node.path}") from None
            return f"{self.node.path} cannot be opened: {error.strerror}"
        return None


@dataclass(frozen=True)
class Condition:
    """A capability whose probe is a function: it returns None, or the reason."""

    name: str
    hint: str
    probe: Callable[[], str | None]


def _sys_admin() -> str | None:
    if os.geteuid() != 0:
        return None  # another check reports it
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff" and not int(value, 16) >> _CAP_SYS_ADMIN & 1:
            return "root lacks the capability CAP_SYS_ADMIN here, and cannot mount"
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
            raise Unseen("only root may look into the directories") from None
        return str(getattr(error, "message", error))
    return None


def _certificates() -> str | None:
    paths = ssl.get_default_verify_paths()
    known = (paths.cafile, paths.openssl_cafile, *_CERTIFICATES)
    if any(path and Path(path).is_file() for path in known):
        return None
    return "no file with certificates of authorities was found: https will fail"


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
