"""The snapshots API of containerd over a Unix socket, and a part of its diff API:
messages to calls of Snapshots, errors to status codes."""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.private_dirs import check_way, follow_own_link, make_private
from btrfs_ublk.containers import messages, status
from btrfs_ublk.containers.images import LazyOptions
from btrfs_ublk.containers.messages import CLASSES
from btrfs_ublk.containers.rpc import Asked, CallError, Code, Method, Server
from btrfs_ublk.containers.snapshots import (
    DEFAULT_MODE,
    Mode,
    SnapshotMount,
    Snapshots,
    check_root,
)
from btrfs_ublk.containers.store import Kind, RefusedError, Snapshot
from btrfs_ublk.device.locks import lock_file
from btrfs_ublk.device.state import RUN_DIRECTORY, RUN_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError, UsageError

log = logging.getLogger(__name__)

#: Calls at once. Most take milliseconds, and wait for the disk; those that open images
#: wait for registries, which may hang. Threads are made when they are needed.
_WORKERS = 256
#: Calls that look into the store, and wait for nothing else.
_AT_ONCE = ("Stat", "List")
_BACKLOG = 128
#: containerd gives up after ten seconds.
_STOP_S = 5.0
_LISTED_AT_ONCE = 100
#: The longest path of a Unix socket, without the NUL (unix(7)).
_MAX_SOCKET_PATH = 107

_KINDS = {
    Kind.VIEW: messages.VIEW,
    Kind.ACTIVE: messages.ACTIVE,
    Kind.COMMITTED: messages.COMMITTED,
}


class _Service:
    """One method for each call of messages.CALLS."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def prepare(self, request: Any) -> Any:
        made = self._snapshots.prepare(request.key, request.parent, request.labels)
        return CLASSES["PrepareSnapshotResponse"](mounts=_mounts(made))

    def view(self, request: Any) -> Any:
        made = self._snapshots.view(request.key, request.parent, request.labels)
        return CLASSES["ViewSnapshotResponse"](mounts=_mounts(made))

    def mounts(self, request: Any) -> Any:
        found = self._snapshots.mounts(request.key)
        return CLASSES["MountsResponse"](mounts=_mounts(found))

    def commit(self, request: Any) -> Any:
        self._snapshots.commit(
            request.name, request.key, request.labels, parent=request.parent
        )
        return CLASSES["Empty"]()

    def remove(self, request: Any) -> Any:
        self._snapshots.remove(request.key)
        return CLASSES["Empty"]()

    def stat(self, request: Any) -> Any:
        found = self._snapshots.stat(request.key)
        return CLASSES["StatSnapshotResponse"](info=_info(found))

    def update(self, request: Any) -> Any:
        info = request.info
        changed = self._snapshots.update(
            info.name, info.labels, request.update_mask.paths
        )
        return CLASSES["UpdateSnapshotResponse"](info=_info(changed))

    def list(self, request: Any) -> Iterator[Any]:
        found = self._snapshots.find(request.filters)
        for first in range(0, len(found), _LISTED_AT_ONCE):
            some = found[first : first + _LISTED_AT_ONCE]
            yield CLASSES["ListSnapshotsResponse"](info=map(_info, some))

    def usage(self, request: Any) -> Any:
        return CLASSES["UsageResponse"](size=self._snapshots.usage(request.key))

    def cleanup(self, request: Any) -> Any:
        self._snapshots.cleanup()
        return CLASSES["Empty"]()


def _mounts(mounts: list[SnapshotMount]) -> list[Any]:
    return [
        CLASSES["Mount"](type=one.type, source=one.source, options=one.options)
        for one in mounts
    ]


def _info(snapshot: Snapshot) -> Any:
    info = CLASSES["Info"](
        name=snapshot.name,
        parent=snapshot.parent,
        kind=_KINDS[snapshot.kind],
        labels=snapshot.labels,
    )
    info.created_at.FromNanoseconds(snapshot.created_ns)
    info.updated_at.FromNanoseconds(snapshot.updated_ns)
    return info


@contextmanager
def _as_status(what: str) -> Iterator[None]:
    """Answer errors of this package with a status; others are defects, and logged."""
    try:
        yield
    except RefusedError as error:
        raise CallError(Code[error.refusal.name], str(error)) from None
    except (UsageError, DecodeError) as error:
        raise CallError(Code.INVALID_ARGUMENT, str(error)) from None
    except BtrfsUblkError as error:
        # NB: as text. Who keeps a record would keep what its traceback refers to.
        log.error("%s: %s", what, str(error))
        raise CallError(Code.INTERNAL, str(error)) from None


def _method(name: str, answer: Callable[[Any], Any]) -> Method:
    parse = CLASSES[messages.CALLS[name][0]].FromString

    def call(data: bytes, _: Asked) -> list[bytes]:
        with _as_status(name):
            found = answer(parse(data))
            some = found if name == "List" else [found]
            return [each.SerializeToString() for each in some]

    return Method(call, waits=name not in _AT_ONCE)


def _methods(
    snapshots: Snapshots, root: Path, containerd: Path | None
) -> dict[str, Method]:
    service = _Service(snapshots)
    made = {
        f"/{messages.SERVICE}/{name}": _method(name, getattr(service, name.lower()))
        for name in messages.CALLS
    }

    def tell(data: bytes, _: Asked) -> list[bytes]:
        with _as_status(status.CALL):
            return [snapshots.status().encode()]

    made[f"/{status.SERVICE}/{status.CALL}"] = Method(tell)
    if containerd is None:
        return made

    # NB: that there is no Apply has containerd use its own.
    def diff(data: bytes, asked: Asked) -> list[bytes]:
        with _as_status("Diff"):
            from btrfs_ublk.containers import differ

            request, metadata = CLASSES["DiffRequest"].FromString(data), asked.metadata
            found = differ.diff(
                *(containerd, root, request, metadata),
                is_wanted=lambda: asked.is_wanted,
            )
            return [found.SerializeToString()]

    return made | {messages.DIFF: Method(diff)}


@contextmanager
def serving(
    root: StrPath,
    address: StrPath,
    options: LazyOptions | None = None,
    *,
    mode: Mode = DEFAULT_MODE,
    containerd: StrPath | None = None,
) -> Iterator[Server]:
    """Answer calls at a Unix socket, which only this user may use, inside the block.

    ``root``: see Snapshots; one process at a time has it. ``options`` say how sealed
    images are opened, ``mode`` what containers are; the ``containerd`` at that socket
    gets the layers that it asks for. Raises BtrfsUblkError.
    """
    path = Path(os.path.abspath(address))
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise UsageError(
            f"{path} is too long for a socket: it takes {_MAX_SOCKET_PATH} bytes",
            hint="choose a directory with a shorter path",
        )
    check_root(Path(root))
    snapshots_root = _make_root(Path(root).absolute())
    lock = lock_file(snapshots_root / "lock")
    if lock is None:
        raise UsageError(
            f"{root} is served by another process", hint="one at a time: stop that one"
        )
    with lock, _only_one_of_its_devices():
        snapshots = Snapshots(snapshots_root, options, mode=mode)
        try:
            asks = None if containerd is None else Path(containerd)
            methods = _methods(snapshots, snapshots_root, asks)
            server = Server(_listen(path), methods, workers=_WORKERS)
            try:
                # Not before: containerd tries to connect seldom.
                snapshots.start()
                yield server
            finally:
                server.stop(_STOP_S)
                path.unlink(missing_ok=True)
        finally:
            snapshots.close()


@contextmanager
def _only_one_of_its_devices() -> Iterator[None]:
    """Raise UsageError where another snapshotter has the directory of devices: those
    of images have the same names with both."""
    run = Path(os.environ.get(RUN_VARIABLE) or RUN_DIRECTORY)
    hint = f"name another one in {RUN_VARIABLE}"
    make_private(run, what="run directory", hint=hint)
    path = run / "snapshotter.lock"
    lock = lock_file(path)
    if lock is None:
        raise UsageError(f"another snapshotter has its devices in {run}", hint=hint)
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    _make_room(path)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise BtrfsUblkError(
            f"cannot listen at {path}: {error.strerror}",
            hint="its directory must be writable",
        ) from error
    finally:
        os.umask(mask)
    return listener


def _make_root(root: Path) -> Path:
    """Make the directory of snapshots; it may be a symbolic link of this user's.
    Returns the directory."""
    what, hint = "directory of snapshots", "name another one: --root DIRECTORY"
    check_way(root, what=what, hint=hint)
    return make_private(follow_own_link(root), what=what, hint=hint)


def _make_room(path: Path) -> None:
    """Make the directory of a socket, and remove one that a killed process has left."""
    if not path.parent.exists():
        make_private(
            path.parent, what="directory of the socket", hint="choose another path"
        )
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(
            f"{path} exists and is no socket", hint="choose another path, or remove it"
        )
    if _has_owner(path):
        raise UsageError(
            f"another process listens on {path}",
            hint="stop that one, or choose another path with --socket",
        )
    path.unlink(missing_ok=True)


def _has_owner(path: Path) -> bool:
    """Return whether a process has the socket: only a refused connection says that
    none has it any more."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)  # a queue that is full has an owner
        try:
            asking.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
