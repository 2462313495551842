"""The interface of front ends for a supervisor: how a device survives its servers. Each
kind is one file: ublk.py, fuse.py."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Protocol

from btrfs_ublk.base.process import RunningServer
from btrfs_ublk.device.state import FrontEnd
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.server.control import Message


class LostError(BtrfsUblkError):
    """The device cannot be brought back as it was, but is still in use. Nothing was
    done to it, and trying again is useless before it is unmounted."""


class DeviceFrontEnd(Protocol):
    """The front end of one device, which it finds in the kernel by the device's tag."""

    name: ClassVar[FrontEnd]

    @property
    def keep_open_fds(self) -> list[int]:
        """Descriptors that the next server inherits, and that a keeper holds, too."""

    def find(self) -> Path | None:
        """Return the block device; None when the kernel has none."""

    def outlives_servers(self, ready: Message) -> bool:
        """Return whether another server can follow one that sent ``ready``."""

    def check_handover(self) -> None:
        """Raise BtrfsUblkError, with the reason, if the device would be lost when its
        server leaves or is killed, even if the server itself does not know that."""

    def takeover_options(self) -> list[str] | None:
        """Return options for a server that takes over the device; None when there is
        none to take over, so that a new one has to be made.

        Raises LostError when the device is lost and in use; BtrfsUblkError when it does
        not answer.
        """

    def start_options(self) -> list[str]:
        """Return options for a server that makes a new device."""

    def attach(self, ready: Message, server: RunningServer) -> Path:
        """Make the block device of a server that is ready usable, and return it; also
        take what the next server needs to take over. Idempotent.

        NB: this may wait for the server, but not after its death. Raises
        BtrfsUblkError, or OSError.
        """

    def let_go(self) -> None:
        """Drop what we hold for the next server. Requests that wait then fail as soon
        as the server and the keepers have ended, too."""

    def going(self, *, safe_stop: bool) -> AbstractContextManager[None]:
        """Keep others from beginning to use the device while its server is asked to
        stop; with ``safe_stop``, the server does that itself. Raises LeftoverError,
        which names the mount, when it is in use."""

    def remove(self) -> bool:
        """Remove what the kernel has of a device whose server has ended. Returns
        whether there was anything.

        Raises LeftoverError, which names the mount, while it is in use."""
