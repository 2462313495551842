"""Speak to systemd as a service: sd_notify(3), and the descriptors that it passes to a
service when it starts it (sd_listen_fds(3)), or keeps for it while it does not run
(FileDescriptorStoreMax= in systemd.service(5))."""

from __future__ import annotations

import json
import os
import socket
from array import array
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress

from btrfs_ublk.base.log import log
from btrfs_ublk.base.process import readable

_ADDRESS = "NOTIFY_SOCKET"
_PASSED = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
#: sd-daemon.h: SD_LISTEN_FDS_START
_FIRST_FD = 3
#: The bytes of the descriptors that a message can take (net/scm.h: SCM_MAX_FD).
_MOST_BYTES = 253 * array("i").itemsize
#: The times for systemd to read messages when many wait, and to process them.
_SEND_TIMEOUT_S = 5.0
_BARRIER_TIMEOUT_S = 5.0


def notify(*assignments: str) -> None:
    """Send assignments ("READY=1", "STATUS=…") if systemd wants them; never fails."""
    with suppress(OSError):
        _send(os.environ.get(_ADDRESS, ""), assignments)


def _send(
    address: str,
    assignments: Sequence[str],
    *,
    fds: Sequence[int] = (),
    timeout_s: float = 0.0,
) -> None:
    """Send one datagram, with descriptors. Raises OSError."""
    if not address:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(timeout_s)
        channel.connect(address)
        socket.send_fds(channel, ["\n".join(assignments).encode()], list(fds))


class ServiceManager:
    """The systemd that runs this process, and what it passed to it by its variables,
    which are removed from ``environment``: children must not take them for theirs."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self.address = environment.pop(_ADDRESS, "")
        pid, count, names = (environment.pop(name, "") for name in _PASSED)
        #: Descriptors that it passed, by name.
        self.passed: dict[str, int] = {}
        if pid == str(os.getpid()):
            fds = range(_FIRST_FD, _FIRST_FD + int(count))
            self.passed = dict(zip(names.split(":"), fds))
        for fd in self.passed.values():
            os.set_inheritable(fd, False)

    @property
    def variables(self) -> dict[str, str]:
        """Variables for a program that takes our place."""
        return {_ADDRESS: self.address}

    def notify(self, *assignments: str) -> None:
        """Do as notify()."""
        with suppress(OSError):
            _send(self.address, assignments)


class StoredFds:
    """Descriptors of one device, and the environment of its servers, in systemd's store
    under a ``name``. They are there when all our processes have been killed.

    They wait in the queue of a socket, and systemd has that socket. NB: it must not
    have them themselves, because it may call fstat(2) for what it stores. On a FUSE
    file, that would wait for the device's server, and all services for systemd.
    """

    def __init__(self, manager: ServiceManager, name: str) -> None:
        self._manager = manager
        self._name = name
        self._stored: list[int] = []

    def restored(self) -> tuple[list[int], dict[str, str]] | None:
        """Return copies of the descriptors, and the environment, which a process before
        us has stored; None if there are none."""
        fd = self._manager.passed.get(self._name)
        if fd is None:
            return None
        # NB: with MSG_PEEK they stay in the queue, for the process after us.
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            with socket.socket(fileno=os.dup(fd)) as queue:
                # NB: socket.recv_fds() of Python 3.11 ignores its flags.
                _, ancillary, _, _ = queue.recvmsg(
                    1, socket.CMSG_SPACE(_MOST_BYTES), flags
                )
            fds = [fd for _, _, data in ancillary for fd in array("i", data)]
            with os.fdopen(fds.pop(0)) as file:
                file.seek(0)
                return fds, json.load(file)
        except (OSError, ValueError, IndexError) as error:
            log.warning("what systemd has stored as %s: %s", self._name, error)
            return None

    def keep(self, fds: list[int], environment: Mapping[str, str]) -> None:
        """Store these instead of earlier ones. What fails is logged: then only keepers
        have them."""
        if fds == self._stored:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        file = os.memfd_create("environment", os.MFD_CLOEXEC)
        with ours, theirs, open(file, "w") as text:
            try:
                json.dump(dict(environment), text)
                text.flush()
                socket.send_fds(ours, [b"\0"], [file, *fds])
                self._tell("FDSTOREREMOVE=1")
                # NB: with FDPOLL, systemd would drop it, as the other end is closed.
                self._tell("FDSTORE=1", "FDPOLL=0", fds=[theirs.fileno()])
                self._stored = list(fds)
            except (OSError, ValueError) as error:
                log.warning("systemd cannot store %d descriptors: %s", len(fds), error)

    def drop(self) -> None:
        """Have systemd close what we, or a process before us, stored, and wait until it
        has."""
        passed = self._manager.passed.pop(self._name, None)
        if passed is not None:
            os.close(passed)
        if passed is None and not self._stored:
            return
        self._stored = []
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            self._tell("FDSTOREREMOVE=1")
            _send(self._manager.address, ["BARRIER=1"], fds=[write_fd])
        except OSError as error:
            log.warning("systemd is not told to close descriptors: %s", error)
        os.close(write_fd)
        # It closes its copy when it has processed both messages.
        if not readable([read_fd], timeout_s=_BARRIER_TIMEOUT_S):
            log.warning("systemd does not close what it stored as %s", self._name)
        os.close(read_fd)

    def _tell(self, *assignments: str, fds: Sequence[int] = ()) -> None:
        words = [*assignments, f"FDNAME={self._name}"]
        _send(self._manager.address, words, fds=fds, timeout_s=_SEND_TIMEOUT_S)
