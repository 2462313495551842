"""A loop device on a server's file outlives the server, but its FUSE connection ends
with the last process that has it: so the supervisor has it as well ("reissue"). Where
the kernel cannot send requests again, or both have died, the next server makes another
connection, and the loop device moves to its file ("swap").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from btrfs_ublk.device.state import DeviceSpec, DeviceState, FrontEnd
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.log import log
from btrfs_ublk.process import ProcessIdentity
from btrfs_ublk.resources import blockdev, loop
from btrfs_ublk.server.control import Message
from btrfs_ublk.server.fuse import attach_loop, served_file, swap
from btrfs_ublk.server.fuse_connection import FuseConnection


class FuseDeviceFrontEnd:
    name: ClassVar[FrontEnd] = "fuse"

    def __init__(
        self, spec: DeviceSpec, state: DeviceState, inherited: Sequence[int] = ()
    ) -> None:
        """``inherited``: keep_open_fds of another."""
        self._spec = spec
        self._known = Path(state.device) if state.device else None
        self._connection: FuseConnection | None = None
        if inherited:
            self._connection = FuseConnection(inherited[0], inherited[1:])

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
        # NB: the server cannot tell whether anybody keeps its connection.
        if not self.keep_open_fds:
            raise BtrfsUblkError(
                "its supervisor does not keep its FUSE connection, which would end",
                hint="reads would fail: unmount the device, and add it anew",
            )

    def takeover_options(self) -> list[str] | None:
        if self._connection is not None:
            # NB: however often servers failed, which may have any reason: what waits
            # for an answer would get an error, and a writable device never came back.
            if not self._connection.has_ended():
                return [
                    *self._connection.arguments(),
                    *self._request_options(),
                    *(["--grow"] if self._is_to_grow() else []),
                ]
            log.warning("the FUSE connection has ended: what waited for it has failed")
        self.let_go()
        device = self.find()
        if device is not None and not self._can_move():
            # A new device takes its place, but not under whoever uses it.
            loop.detach(device, self._spec.tag)
        return None

    def start_options(self) -> list[str]:
        queues = self._spec.queues
        return [
            *(["--queues", str(queues)] if queues is not None else []),
            *self._request_options(),
        ]

    def attach(self, ready: Message, server: ProcessIdentity) -> Path:
        device = self.find()
        if device is None:
            device = attach_loop(
                ready,
                self._spec.tag,
                size_bytes=self._spec.size_bytes,
                read_only=self._spec.read_only,
            )
        elif not loop.is_on(device, served_file(ready)):
            swap(device, self._spec.tag, ready)
        else:
            loop.grow(device, self._spec.tag, served_file(ready))
        self._known = device
        self._keep(ready, server)
        return device

    def let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    @contextmanager
    def going(self, *, safe_stop: bool) -> Iterator[None]:
        # It goes before its server does.
        self.remove()
        yield

    def remove(self) -> bool:
        self.let_go()
        device = self.find()
        return device is not None and loop.detach(device, self._spec.tag)

    def _keep(self, ready: Message, server: ProcessIdentity) -> None:
        if self._spec.recovery not in ("auto", "reissue"):
            return
        # NB: what was taken over is ours already. Let go for a moment, it would end if
        # the server were killed just then.
        if self._connection is not None:
            return
        try:
            self._connection = FuseConnection.of_server(ready, server)
        except BtrfsUblkError as error:
            if self._spec.recovery == "reissue":
                raise
            log.warning("recovery by swap, as %s", error)

    def _is_to_grow(self) -> bool:
        device = self.find()
        return (
            device is not None and blockdev.size_bytes(device) < self._spec.size_bytes
        )

    def _can_move(self) -> bool:
        return self._spec.read_only and self._spec.recovery != "none"

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
