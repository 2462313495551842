"""Start and end keepers. A keeper (csrc/tools/keeper.c) survives the death of both
supervisor and server: it holds the FUSE connection, and starts another supervisor.

Its supervisor holds the only write end of a pipe to it. The keeper is told to begin its
work only when it is recorded (state.json); before, it ends with its supervisor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from btrfs_ublk.base.helpers import KEEPER, helper_path
from btrfs_ublk.base.log import log
from btrfs_ublk.base.process import launch
from btrfs_ublk.device.running import RunningServer
from btrfs_ublk.device.state import DeviceDirectory, DeviceState, KeeperRecord
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.server.fuse_connection import fds_of_process


class Keeper:
    """A keeper that we have started; made by start_keeper()."""

    def __init__(
        self, process: RunningServer, pipe_fd: int, record: KeeperRecord
    ) -> None:
        self._process = process
        self._pipe_fd = pipe_fd
        self.record = record

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pipe_fd(self) -> int:
        """The pipe, to be kept open by a program that takes our place: if it is
        closed, the keeper takes us for dead."""
        return self._pipe_fd

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the keeper ends."""
        return self._process.fileno()

    def has_ended(self) -> bool:
        return self._process.wait(0.0)

    def tell(self, word: Literal["go", "stay"]) -> None:
        """Say "go": work; or "stay": keep the descriptors, but start no supervisor."""
        with suppress(OSError):  # it has ended
            os.write(self._pipe_fd, word[:1].encode())

    def close(self, *, kill: bool) -> None:
        """Forget the keeper, after killing it if ``kill``."""
        if kill:
            self._process.kill()
        self._process.how_it_ended()  # NB: this reaps it, or it would be a zombie.
        self._process.close()
        os.close(self._pipe_fd)


def start_keeper(
    directory: DeviceDirectory,
    fds: Sequence[int],
    *,
    revival: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Keeper:
    """Start a keeper, which does nothing before tell("go"). ``revival`` are options and
    the command that starts another supervisor, if any. The keeper gets ``environment``,
    which is for the device's servers: environment_of() reads it. Raises BtrfsUblkError.
    """
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        child = launch(
            [
                *(helper_path(KEEPER), "--watch", str(read_fd)),
                *("--directory", str(directory.path), *revival),
            ],
            keep_open_fds=[read_fd, *fds],
            # A keeper outlives us.
            death_signal=None,
            new_session=True,
            talk=directory.log,
            env=environment,
        )
        record = KeeperRecord(
            process=child.identity, fds=list(fds), revives=bool(revival)
        )
        return Keeper(RunningServer(child.identity, child), write_fd, record)
    except BaseException as error:
        os.close(write_fd)
        if isinstance(error, OSError):
            raise BtrfsUblkError(f"cannot start a keeper: {error}") from error
        raise
    finally:
        os.close(read_fd)


def end_keepers(records: Iterable[KeeperRecord]) -> None:
    """Kill keepers. What only they hold is gone then."""
    for record in records:
        with suppress(ProcessLookupError):
            process = RunningServer(record.process)
            if not process.kill():
                log.warning(
                    "keeper %d was killed, but hangs in the kernel", process.pid
                )
            process.how_it_ended()
            process.close()


def kept_fds(records: Iterable[KeeperRecord]) -> list[int]:
    """Return copies of the descriptors of the last keeper that runs, if any."""
    for record in reversed(list(records)):
        try:
            return fds_of_process(record.process, record.fds)
        except (BtrfsUblkError, OSError) as error:
            log.info("nothing from keeper %d: %s", record.process.pid, error)
    return []


def environment_of(state: DeviceState) -> dict[str, str] | None:
    """Return the environment of the device's keeper, or else of its server; None when
    neither runs."""
    processes = [record.process for record in reversed(state.keepers)]
    for process in [*processes, *filter(None, [state.server])]:
        with suppress(OSError):
            text = os.fsdecode(Path(f"/proc/{process.pid}/environ").read_bytes())
            if process.is_alive():
                pairs = (each.partition("=") for each in text.split("\0") if each)
                return {name: value for name, _, value in pairs}
    return None


def reviving(state: DeviceState) -> KeeperRecord | None:
    """Return the keeper that starts another supervisor when that has died, if any."""
    if state.supervisor is None:
        return None  # The supervisor has ended on purpose.
    for record in state.keepers:
        if record.revives and record.process.is_alive():
            return record
    return None
