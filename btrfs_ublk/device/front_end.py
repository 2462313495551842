"""What a front end is, for a supervisor: how a device survives its servers. One kind is
one file: ublk.py, fuse.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Protocol

from btrfs_ublk.device.state import FrontEnd
from btrfs_ublk.process import ProcessIdentity
from btrfs_ublk.server.control import Message


class DeviceFrontEnd(Protocol):
    """Of one device; it finds what is there by the device's tag."""

    name: ClassVar[FrontEnd]

    @property
    def keep_open_fds(self) -> list[int]:
        """What the next server is to inherit."""

    def find(self) -> Path | None:
        """The block device, as far as the kernel has it."""

    def outlives_servers(self, ready: Message) -> bool:
        """Whether there is a next server for a device whose last one sent ``ready``."""

    def check_handover(self) -> None:
        """Raise BtrfsUblkError, saying why, when a server that leaves, or is killed,
        would take the device along, whatever that server itself believes.
        """

    def takeover_options(self) -> list[str] | None:
        """For a server that goes on with what there is; None when there is nothing that
        a server could go on with, and a new device is to be made.

        Raises BtrfsUblkError when there is something, but it is lost.
        """

    def start_options(self) -> list[str]:
        """For a server that makes a new one."""

    def attach(self, ready: Message, server: ProcessIdentity) -> Path:
        """The block device of a server that is ready, for whoever uses it to read on;
        idempotent. Gets hold of what makes a takeover from that server possible.

        NB: may wait for the server; let_go() and its death end that. Raises
        BtrfsUblkError.
        """

    def let_go(self) -> None:
        """Drop what we hold for the next server: what waits for an answer then fails
        as soon as the server is gone as well.
        """

    def going(self, *, safe_stop: bool) -> AbstractContextManager[None]:
        """The device is about to go: nobody can begin to use it while its server is
        asked to stop; with ``safe_stop``, the server sees to that itself. Raises
        LeftoverError, naming the mount, when somebody has.
        """

    def remove(self) -> bool:
        """Remove what the kernel has; the server is gone. True when there was any.

        Raises LeftoverError, naming the mount, while it is in use.
        """
