"""Keep a loop device on a server's file when the server dies. The loop device survives,
but its FUSE connection ends with the last process that has it, so supervisor and keeper
have it as well. When all have died, the device is lost. Then it is replaced if nobody
uses it, and left alone if somebody does.

NB: the loop device is never moved to another server's file (LOOP_CHANGE_FD): the kernel
treats that as a changed medium, and drops data that were written and not synced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

from btrfs_ublk.base.log import log
from btrfs_ublk.base.process import RunningServer, call_bounded
from btrfs_ublk.device.front_end import LostError
from btrfs_ublk.device.state import DeviceSpec, DeviceState, FrontEnd
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel import blockdev, loop
from btrfs_ublk.server.control import Message
from btrfs_ublk.server.fuse import attach_loop, served_file
from btrfs_ublk.server.fuse_connection import FuseConnection

#: The time for a running server to answer the kernel.
_ANSWER_TIMEOUT_S = 30.0
#: The time for an unmount that is in progress to end.
_UNUSED_TIMEOUT_S = 2.0


class FuseDeviceFrontEnd:
    name: ClassVar[FrontEnd] = "fuse"

    def __init__(
        self, spec: DeviceSpec, state: DeviceState, inherited: Sequence[int] = ()
    ) -> None:
        """``inherited`` are keep_open_fds of the supervisor before."""
        self._spec = spec
        self._known = Path(state.device) if state.device else None
        self._connection: FuseConnection | None = None
        if inherited:
            self._connection = FuseConnection(inherited[0], inherited[1:])
            if self._connection.has_ended():
                self.let_go()

    @property
    def keep_open_fds(self) -> list[int]:
        return self._connection.descriptors() if self._connection else []

    def find(self) -> Path | None:
        if self._known is None or not loop.has_tag(self._known, self._spec.tag):
            self._known = loop.find_by_tag(self._spec.tag)
        return self._known

    def outlives_servers(self, ready: Message) -> bool:
        return bool(ready.get("recovery", self._spec.recovery) != "none")

    def check_handover(self) -> None:
        # NB: the server does not know whether anybody keeps its connection.
        if not self.keep_open_fds:
            raise BtrfsUblkError(
                "its supervisor does not keep its FUSE connection, which would end",
                hint="reads would fail: unmount the device, and make it again",
            )

    def takeover_options(self) -> list[str] | None:
        if self._connection is not None and not self._connection.has_ended():
            # NB: do this however often servers have failed. Without a takeover,
            # requests that wait would fail, and the device would be lost.
            device = self._find_unasked()
            if device is not None:
                return [
                    *self._connection.arguments(),
                    *self._request_options(),
                    *(["--grow"] if self._is_to_grow(device) else []),
                ]
            log.warning("the loop device was detached by another program")
        elif self._connection is not None:
            log.warning(
                "the FUSE connection has ended: requests that waited for it have failed"
            )
        self.let_go()
        device = self.find()
        if device is not None:
            self._give_up(device)
        return None

    def start_options(self) -> list[str]:
        queues = self._spec.queues
        return [
            *(["--queues", str(queues)] if queues is not None else []),
            *self._request_options(),
        ]

    def attach(self, ready: Message, server: RunningServer) -> Path:
        if self._connection is not None:
            # NB: do not touch the file, for which only the server can answer. If that
            # dies, we would wait for the next server, which only we can start.
            device = self._find_unasked()
            if device is None:
                raise BtrfsUblkError("its loop device was detached by another program")
            if self._is_to_grow(device):
                grow = partial(loop.grow, device, self._spec.tag, served_file(ready))
                _ask(server, grow)
            return device
        device = self.find()
        if device is None:
            device = attach_loop(
                ready,
                self._spec.tag,
                size_bytes=self._spec.size_bytes,
                read_only=self._spec.read_only,
            )
        elif loop.is_on(device, served_file(ready)):
            loop.grow(device, self._spec.tag, served_file(ready))
        else:
            raise BtrfsUblkError(f"{device} belongs to the file of another server")
        self._known = device
        self._keep(ready, server)
        return device

    def let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    @contextmanager
    def going(self, *, safe_stop: bool) -> Iterator[None]:
        # The loop device goes before its server does.
        self.remove()
        yield

    def remove(self) -> bool:
        self.let_go()
        device = self.find()
        return device is not None and loop.detach(device, self._spec.tag)

    def _keep(self, ready: Message, server: RunningServer) -> None:
        if self._spec.recovery not in ("auto", "reissue"):
            return
        try:
            self._connection = FuseConnection.of_server(ready, server.identity)
        except BtrfsUblkError as error:
            if self._spec.recovery == "reissue":
                raise
            log.warning(
                "the device will not survive the death of its server: %s", error
            )

    def _give_up(self, device: Path) -> None:
        """Detach a lost device, so that a new one can replace it. Raises LostError when
        it is in use."""
        users = blockdev.wait_until_unused(device, timeout_s=_UNUSED_TIMEOUT_S)
        users = users or blockdev.openers(device)
        if users:
            raise LostError(
                f"its FUSE connection has ended, and {device} is in use: "
                f"{'; '.join(users)}. Nothing was done to it; reads of what is not "
                "cached fail",
                hint=f"unmount it, which keeps what was written; then: btrfs-ublk "
                f"device recover {self._spec.name}, or, for a volume, volume up",
            )
        loop.detach(device, self._spec.tag)
        self._known = None

    def _find_unasked(self) -> Path | None:
        """Find the loop device in sysfs: asking the device would ask its file."""
        if self._known is None or not loop.names_tag(self._known, self._spec.tag):
            return None
        return self._known

    def _is_to_grow(self, device: Path) -> bool:
        return blockdev.size_in_sysfs(device) < self._spec.size_bytes

    def _request_options(self) -> list[str]:
        return [
            *("--recovery", self._spec.recovery),
            *(["--depth", str(self._spec.depth)] if self._spec.depth else []),
            *(
                ["--max-io", str(self._spec.max_io_bytes)]
                if self._spec.max_io_bytes
                else []
            ),
        ]


def _ask(server: RunningServer, function: Callable[[], None]) -> None:
    """Call a function that waits for the server in the kernel, but only wait while that
    lives. Raises what it raises; BtrfsUblkError when the server has ended or does not
    answer. The thread then waits until another server answers."""
    try:
        call_bounded(function, timeout_s=_ANSWER_TIMEOUT_S, unless=[server])
    except TimeoutError:
        what = "has ended" if server.wait(0.0) else "does not answer the kernel"
        raise BtrfsUblkError(f"server {server.pid} {what}") from None
