"""A server process and its block device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from btrfs_ublk.base import libraries
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.hosts import via_option
from btrfs_ublk.base.ledger import Entry, Ledger, process_ledger
from btrfs_ublk.base.log import log
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.process import Child, describe_exit, launch
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.content import Added, Addition, MapClient, Room, Source, SourceKeys
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, error_of_status
from btrfs_ublk.server.control import ControlConnection, ControlError, InUseError
from btrfs_ublk.server.description import Description, FileSegment, LazySegment
from btrfs_ublk.server.devices import STOP_TIMEOUT_S
from btrfs_ublk.server.front_end import FrontEnd
from btrfs_ublk.server.front_ends import choose_front_end
from btrfs_ublk.server.fuse import served_file
from btrfs_ublk.server.names import FrontEndName
from btrfs_ublk.server.stats import ServerStats

_PROTOCOL = 1
READY_TIMEOUT_S = 30.0
_REQUEST_TIMEOUT_S = 10.0
#: The time between the close of the connection and the end of the process.
_LAST_WORDS_TIMEOUT_S = 5.0


class BlockServer:
    """``with BlockServer(description) as server:`` serves it at ``server.device``.

    ``front_end`` is "ublk", "fuse" (a loop device on a file of the server), or "auto":
    ublk where the kernel has it and survives its death. ``queues`` are threads; they,
    ``depth`` and ``max_io_bytes`` (largest request) default to the server's own choice.
    ``features`` of the ublk driver are required, such as "auto-buf-reg", which is only
    used if asked for.

    The server process dies with us: it stops when the control connection closes.
    Leaving the block while the device is mounted or held raises LeftoverError, which
    names the mount, and leaves the device as it is; ``stop()`` may then be tried again.
    Entering raises UsageError for a description that the server refuses (a missing
    file, say), CapabilityError, and BtrfsUblkError with the end of the server's stderr.
    """

    def __init__(
        self,
        description: Description,
        *,
        front_end: FrontEndName = "auto",
        queues: int | None = None,
        depth: int | None = None,
        max_io_bytes: int | None = None,
        features: Iterable[str] = (),
        ready_timeout_s: float = READY_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        ledger: Ledger | None = None,
    ) -> None:
        self.description = description
        self._front_end_name = front_end
        self._front_end: FrontEnd | None = None
        self._features = list(features)
        self._options = {"queues": queues, "depth": depth, "max-io": max_io_bytes}
        self._ready_timeout_s = ready_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._ledger = ledger
        self._entry: Entry | None = None
        self._child: Child | None = None
        self._control: ControlConnection | None = None
        self._ready: dict[str, Any] = {}
        self._device: Path | None = None
        #: The statistics that the server sent when it stopped.
        self.final_stats: ServerStats | None = None

    def __enter__(self) -> BlockServer:
        if self._entry is not None:
            raise BtrfsUblkError("this block server runs already")
        self._ledger = ledger = self._ledger or process_ledger()
        self._front_end = front_end = choose_front_end(
            self._front_end_name, only_ublk=bool(self._features)
        )
        try:
            with deferred():
                files = _files(self.description)
                self._entry = entry = ledger.enter(front_end.kind, files=files)
                child = self._start(entry, front_end)
                ledger.amend(entry, server=dataclasses.asdict(child.identity))
            self._wait_ready(child)
            self._attach(child, front_end, entry)
            ledger.amend(entry, device=str(self.device))
        except BaseException as error:
            self._stop_after(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
        else:
            self._stop_after(error)

    @property
    def device(self) -> Path:
        """The block device: /dev/ublkbN, or /dev/loopN."""
        if self._device is None:
            raise BtrfsUblkError("the block server does not run")
        return self._device

    @property
    def file(self) -> Path:
        """With fuse, the file that the loop device is on. Root can open it, and read it
        directly. Raises ControlError when there is none."""
        return served_file(self._ready)

    @property
    def device_id(self) -> int:
        """The ublk device's number, N of /dev/ublkbN."""
        return int(self._ready["id"])

    @property
    def front_end(self) -> str:
        """The front end that was chosen: "ublk" or "fuse"."""
        if self._front_end is None:
            raise BtrfsUblkError("the block server does not run")
        return self._front_end.name

    @property
    def pid(self) -> int:
        """The process ID of the server."""
        if self._child is None:
            raise BtrfsUblkError("the block server does not run")
        return self._child.pid

    def stats(self) -> ServerStats:
        """Statistics of the server so far. Raises BtrfsUblkError if it does not run or
        does not answer."""
        if self._child is None or self._control is None:
            raise BtrfsUblkError("the block server does not run")
        reply = self._control.request(
            "stats", child=self._child, timeout_s=_REQUEST_TIMEOUT_S
        )
        return ServerStats.parse(reply["stats"])

    def map(self, path: StrPath | None = None) -> MapClient:
        """The map of a lazy segment; ``path`` says which one if there are several."""
        return MapClient(self._ask, path=path)

    def map_add(
        self,
        sources: Sequence[Source | SourceKeys],
        additions: Sequence[Addition],
        *,
        room: Room | None = None,
    ) -> list[Added]:
        """Call ``map().add(…)``, which adds all or none and is durable when it
        returns."""
        return self.map().add(sources, additions, room=room)

    def _ask(
        self, name: str, keys: dict[str, Any], *, fd: int | None, timeout_s: float
    ) -> dict[str, Any]:
        if self._child is None or self._control is None:
            raise BtrfsUblkError("the block server does not run")
        reply = self._control.request(
            name, keys, child=self._child, timeout_s=timeout_s, fd=fd
        )
        body: dict[str, Any] = reply[name]
        return body

    def _argv(self, front_end: str, tag: str, control_fd: int) -> list[str | Path]:
        argv: list[str | Path] = [helper_path(SERVER), "--front-end", front_end]
        for name, value in self._options.items():
            if value is not None:
                argv += [f"--{name}", str(value)]
        for name in self._features:
            argv += ["--feature", name]
        argv += via_option()
        return [*argv, "--tag", tag, "--control-fd", str(control_fd), "-"]

    def _start(self, entry: Entry, front_end: FrontEnd) -> Child:
        control = ControlConnection()
        try:
            self._child = launch(
                self._argv(front_end.name, entry.tag, control.server_fd()),
                stdin=self.description.to_json(),
                keep_open_fds=[control.server_fd()],
                # It must finish its teardown, which it begins when the connection ends.
                death_signal=None,
            )
        except BaseException:
            control.close()
            raise
        control.started()
        self._control = control
        return self._child

    def _wait_ready(self, child: Child) -> None:
        assert self._control is not None
        try:
            ready = self._control.wait_event(
                "ready", child=child, timeout_s=self._ready_timeout_s
            )
            if ready.get("protocol") != _PROTOCOL:
                raise ControlError(
                    f"the server speaks protocol {ready.get('protocol')}, "
                    f"not {_PROTOCOL}",
                    hint="build package and helpers from one version",
                )
            self._ready = ready
        except ControlError as error:
            raise self._explain(child, str(error)) from error
        if ready.get("io_flusher") is False:
            log.info("the server has no CAP_SYS_RESOURCE, so no PR_SET_IO_FLUSHER")

    def _attach(self, child: Child, front_end: FrontEnd, entry: Entry) -> None:
        assert self._ledger is not None
        try:
            self._device = front_end.attach(
                self._ready, self.description, entry, self._ledger
            )
        except (ControlError, TimeoutError) as error:
            raise self._explain(child, str(error)) from error

    def _explain(self, child: Child, what: str) -> BtrfsUblkError:
        """Prefer the server's own last message, if it ended by itself, to ``what``."""
        status = child.wait(_LAST_WORDS_TIMEOUT_S)
        if status is None:
            return BtrfsUblkError(child.failure(f"gave no device ({what})"))
        if status == libraries.EXIT_STATUS:
            missing = libraries.library_error(child.argv[0], child.stderr_tail())
            if missing is not None:
                return missing
        message = child.failure(f"{describe_exit(status)} before its device was ready")
        return error_of_status(status)(message)

    def stop(self) -> None:
        """Take the device down and end the server; idempotent.

        Raises LeftoverError while the device is mounted or held.
        """
        if self._entry is not None and self._ledger is not None:
            if self._front_end is not None and self._front_end.attached is not None:
                self._ledger.undo_at_end(self._front_end.attached)
            self._ledger.undo_at_end(self._entry, self._take_down)
            self._entry = None

    def _stop_after(self, error: BaseException) -> None:
        if self._entry is not None and self._ledger is not None:
            if self._front_end is not None and self._front_end.attached is not None:
                self._ledger.undo_after(error, self._front_end.attached)
            self._ledger.undo_after(error, self._entry, self._take_down)
            if self._entry not in self._ledger.entries():
                self._entry = None  # This object may be entered again.

    def _take_down(self, entry: Entry) -> None:
        assert self._front_end is not None
        if self._device is not None:
            self._front_end.refuse_if_used(self._device)
        child, control = self._child, self._control
        if child is not None and control is not None:
            deadline_s = time.monotonic() + self._stop_timeout_s
            self._ask_to_stop(child, control)
            # It may still be stopping, so it gets what is left of its time.
            remaining_s = deadline_s - time.monotonic()
            child.stop(timeout_s=max(_REQUEST_TIMEOUT_S, remaining_s))
            control.close()
            child.close()
            self._child = self._control = None
        # A killed server leaves this. The driver removes the node before the record.
        self._front_end.remove(entry)
        self._ready, self._device = {}, None

    def _ask_to_stop(self, child: Child, control: ControlConnection) -> None:
        """Ask the server to stop, and leave the rest to stop(). Raises LeftoverError
        when the device is in use."""
        if not self._ready or child.returncode is not None:
            return
        try:
            control.request("stop", child=child, timeout_s=_REQUEST_TIMEOUT_S)
            stopped = control.wait_event(
                "stopped", child=child, timeout_s=self._stop_timeout_s
            )
            child.wait(timeout_s=_REQUEST_TIMEOUT_S)
            self.final_stats = ServerStats.parse(stopped["stats"])
        except InUseError as error:
            raise LeftoverError(
                f"{self._device} is in use and was not removed", hint="unmount it first"
            ) from error
        except ControlError as error:
            log.warning("%s", child.failure(f"does not stop as asked ({error})"))
        except BtrfsUblkError as error:
            log.warning("%s", error)  # The statistics are not valid; it has stopped.


def _files(description: Description) -> list[str]:
    """Paths that the server needs while it runs: devices, and directories of files."""
    paths = {
        Path(segment.path).resolve()
        for segment in description.segments
        if isinstance(segment, FileSegment)
    }
    for segment in description.segments:
        if isinstance(segment, LazySegment):
            paths |= {Path(x).resolve() for x in (segment.map, segment.cache) if x}
    return sorted(
        {str(path if path.is_block_device() else path.parent) for path in paths}
    )
