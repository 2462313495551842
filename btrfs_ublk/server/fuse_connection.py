"""Keep a FUSE connection when its server dies: recovery "reissue".

The kernel ends a connection when its last descriptor is closed. A process that has the
descriptors, too, keeps the connection: when the server is killed, requests wait. Those
that it had received are in its journal (one of the descriptors) for the next server,
and readers see no error.
"""

from __future__ import annotations

import ctypes
import os
import select
import weakref
from collections.abc import Sequence
from types import TracebackType

from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.server.control import ControlError, Message
from btrfs_ublk.server.fuse import served_file

_NR_PIDFD_GETFD = 438  # Linux 5.6; the same on all architectures


class FuseConnection:
    """The descriptors of a fuse server, which we keep open as well.

    They are taken from a running server, whichever process has started it. When it has
    ended (waited for, not only signalled), the next one is started with arguments(),
    and inherits descriptors(). While this is open, reads of the device wait for a
    server instead of failing, so close() it when there will be none.

    NB: take them only after the loop device is attached. A process that opens the file,
    or stats it, waits for the server, even if it is killed itself, so it must not be
    the one that starts the next server.
    """

    def __init__(self, file: int, devices: Sequence[int]) -> None:
        self._file: int | None = file
        self._devices = list(devices)
        _connections.add(self)

    @classmethod
    def of_server(cls, ready: Message, server: ProcessIdentity) -> FuseConnection:
        """Take the descriptors from a server. ``ready`` is its ready event, or its
        reply to "info".

        Raises ControlError when that server leaves nothing to another one, and
        BtrfsUblkError when it has ended meanwhile, or we may not.
        """
        numbers = ready.get("fuse_fds")
        if ready.get("recovery") != "reissue" or not isinstance(numbers, list):
            raise ControlError(f"the server's connection cannot be kept: {ready}")
        with deferred():
            try:
                # Do this first: with the devices open, too, it might wait for ever.
                file = os.open(served_file(ready), os.O_PATH | os.O_CLOEXEC)
                try:
                    return cls(file, fds_of_process(server, numbers))
                except BaseException:
                    os.close(file)
                    raise
            except OSError as error:
                raise BtrfsUblkError(
                    f"cannot share the FUSE connection of process {server.pid}: "
                    f"{error.strerror or error}",
                    hint="this needs root, and CAP_SYS_PTRACE in a container",
                ) from error

    def __enter__(self) -> FuseConnection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def descriptors(self) -> list[int]:
        """The descriptors that the next server inherits, under the same numbers."""
        return [] if self._file is None else [self._file, *self._devices]

    def arguments(self) -> list[str]:
        """Arguments for the command line of the next server. ``--tag`` and the
        description must be those of the first one; ``--queues`` must not be given."""
        return ["--recover-fds", ",".join(map(str, self.descriptors()))]

    def has_ended(self) -> bool:
        """Return whether the kernel or an administrator has ended the connection, so
        that no server can continue."""
        poller = select.poll()
        for fd in self._devices:
            poller.register(fd, 0)  # poll(2) always reports POLLERR.
        return not self._devices or bool(poller.poll(0))

    def close(self) -> None:
        """Let the connection end with its server; idempotent."""
        with deferred():
            for fd in self.descriptors():
                os.close(fd)
            self._file, self._devices = None, []


#: NB: a forked child that kept a connection would keep it from ending with us.
_connections: weakref.WeakSet[FuseConnection] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


@deferred()
def fds_of_process(process: ProcessIdentity, numbers: Sequence[object]) -> list[int]:
    """Copy descriptors of another process. Raises OSError when it has ended, or we may
    not."""
    opened: list[int] = []
    try:
        pidfd = os.pidfd_open(process.pid)
        try:
            for number in numbers:
                opened.append(_pidfd_getfd(pidfd, number))
        finally:
            os.close(pidfd)
        # It still lives now that all are open, so they are of no other process.
        if not process.is_alive():
            raise ProcessLookupError("it has ended")
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise
    return opened


def _pidfd_getfd(pidfd: int, number: object) -> int:
    """Call pidfd_getfd(2), which shares the open file instead of opening it again.
    Raises OSError, ControlError."""
    if not isinstance(number, int):
        raise ControlError(f"the server names a descriptor {number!r}")
    library = ctypes.CDLL(None, use_errno=True)
    fd: int = library.syscall(_NR_PIDFD_GETFD, pidfd, number, 0)
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd
