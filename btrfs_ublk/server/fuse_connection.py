"""A FUSE connection that outlives its servers: recovery "reissue" (Linux 6.9).

The kernel ends a connection with the last of its descriptors. Whoever keeps them keeps
it: when the server is killed, requests wait, those that it had taken are given to the
next server, and nobody above sees an error.
"""

from __future__ import annotations

import ctypes
import os
import select
import weakref
from collections.abc import Sequence
from types import TracebackType

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.interrupts import deferred
from btrfs_ublk.process import ProcessIdentity
from btrfs_ublk.server.control import ControlError, Message
from btrfs_ublk.server.fuse import served_file

_NR_PIDFD_GETFD = 438  # Linux 5.6; the same on all architectures


class FuseConnection:
    """What a server of the fuse front end has open, kept open by us as well.

    Taken from a server that serves, whoever started it; when that has ended (waited
    for, not only signalled), the next one is started with arguments(), and inherits
    descriptors(). As long as this is open, reads of the device wait for a server rather
    than fail: close() it when there is to be none.

    NB: only after the loop device is attached. Whoever opens the file, or looks at it,
    waits for the server, even when he is killed himself: he must not be the one who
    is to bring up the next.
    """

    def __init__(self, file: int, devices: Sequence[int]) -> None:
        self._file: int | None = file
        self._devices = list(devices)
        _connections.add(self)

    @classmethod
    def of_server(cls, ready: Message, server: ProcessIdentity) -> FuseConnection:
        """``ready`` is what the server sent, or its answer to "info".

        Raises ControlError when the kernel cannot give requests to another server, and
        BtrfsUblkError when this one has ended meanwhile, or we may not.
        """
        numbers = ready.get("fuse_fds")
        if ready.get("recovery") != "reissue" or not isinstance(numbers, list):
            raise ControlError(f"the server's connection cannot be kept: {ready}")
        opened: list[int] = []
        with deferred():
            try:
                # First: with the devices open too, nobody might ever answer this.
                opened.append(os.open(served_file(ready), os.O_PATH | os.O_CLOEXEC))
                pidfd = os.pidfd_open(server.pid)
                try:
                    for number in numbers:
                        opened.append(_pidfd_getfd(pidfd, number))
                finally:
                    os.close(pidfd)
                # Looked at with all of them open: it was no other process's.
                if not server.is_alive():
                    raise ProcessLookupError("it has ended")
            except BaseException as error:
                for fd in opened:
                    os.close(fd)
                if not isinstance(error, OSError):
                    raise
                raise BtrfsUblkError(
                    f"cannot share the FUSE connection of process {server.pid}: "
                    f"{error.strerror or error}",
                    hint="this needs root, and CAP_SYS_PTRACE in a container",
                ) from error
            return cls(opened[0], opened[1:])

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
        """What the next server is to inherit, under the same numbers."""
        return [] if self._file is None else [self._file, *self._devices]

    def arguments(self) -> list[str]:
        """Of the next server's command line. ``--tag``, ``--max-io`` and the
        description must be those of the first one; ``--queues`` is not to be given.
        """
        return ["--recover-fds", ",".join(map(str, self.descriptors()))]

    def has_ended(self) -> bool:
        """Whether the kernel, or an administrator, has ended it all the same: no server
        can go on with it.
        """
        poller = select.poll()
        for fd in self._devices:
            poller.register(fd, 0)  # POLLERR comes unasked
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


def _pidfd_getfd(pidfd: int, number: object) -> int:
    """pidfd_getfd(2): the same open file, not another one of its name."""
    if not isinstance(number, int):
        raise ControlError(f"the server names a descriptor {number!r}")
    library = ctypes.CDLL(None, use_errno=True)
    fd: int = library.syscall(_NR_PIDFD_GETFD, pidfd, number, 0)
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd
