"""The snapshots API of containerd over a Unix socket, and a part of its diff API:
messages to calls of Snapshots, errors to status codes."""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.private_dirs import check_way, follow_own_link, make_private
from btrfs_ublk.containers import differ, messages, status
from btrfs_ublk.containers.images import LazyOptions
from btrfs_ublk.containers.messages import CLASSES
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
    """One method for each call of messages.CALLS; they return a response's fields."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def prepare(self, request: Any) -> dict[str, Any]:
        made = self._snapshots.prepare(request.key, request.parent, request.labels)
        return {"mounts": _mounts(made)}

    def view(self, request: Any) -> dict[str, Any]:
        made = self._snapshots.view(request.key, request.parent, request.labels)
        return {"mounts": _mounts(made)}

    def mounts(self, request: Any) -> dict[str, Any]:
        return {"mounts": _mounts(self._snapshots.mounts(request.key))}

    def commit(self, request: Any) -> dict[str, Any]:
        self._snapshots.commit(
            request.name, request.key, request.labels, parent=request.parent
        )
        return {}

    def remove(self, request: Any) -> dict[str, Any]:
        self._snapshots.remove(request.key)
        return {}

    def stat(self, request: Any) -> dict[str, Any]:
        return {"info": _info(self._snapshots.store.get(request.key))}

    def update(self, request: Any) -> dict[str, Any]:
        name, labels = request.info.name, request.info.labels
        changed = self._snapshots.store.update(name, labels, request.update_mask.paths)
        return {"info": _info(changed)}

    def list(self, request: Any) -> Iterator[dict[str, Any]]:
        found = self._snapshots.store.find(request.filters)
        for first in range(0, len(found), _LISTED_AT_ONCE):
            yield {"info": map(_info, found[first : first + _LISTED_AT_ONCE])}

    def usage(self, request: Any) -> dict[str, Any]:
        return {"size": self._snapshots.usage(request.key)}

    def cleanup(self, request: Any) -> dict[str, Any]:
        self._snapshots.cleanup()
        return {}


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
def _as_status(context: grpc.ServicerContext, what: str) -> Iterator[None]:
    """Answer errors of this package with a status; others are defects, and logged."""
    try:
        yield
    except RefusedError as error:
        context.abort(grpc.StatusCode[error.refusal], str(error))
    except UsageError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except BtrfsUblkError as error:
        # NB: as text. Who keeps a record would keep what its traceback refers to.
        log.error("%s: %s", what, str(error))
        context.abort(grpc.StatusCode.INTERNAL, str(error))


def _handlers(service: _Service) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        messages.SERVICE, {name: _handler(service, name) for name in messages.CALLS}
    )


def _handler(service: _Service, name: str) -> Any:
    request, response = messages.CALLS[name]
    answer, made = getattr(service, name.lower()), CLASSES[response]

    def one(request: Any, context: grpc.ServicerContext) -> Any:
        with _as_status(context, name):
            return made(**answer(request))

    def many(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with _as_status(context, name):
            for fields in answer(request):
                yield made(**fields)

    codec = {
        "request_deserializer": CLASSES[request].FromString,
        "response_serializer": made.SerializeToString,
    }
    if name == "List":
        return grpc.unary_stream_rpc_method_handler(many, **codec)
    return grpc.unary_unary_rpc_method_handler(one, **codec)


def _status_handler(snapshots: Snapshots) -> grpc.GenericRpcHandler:
    def call(_request: Any, context: grpc.ServicerContext) -> bytes:
        with _as_status(context, status.CALL):
            return snapshots.status().encode()

    handler: Any = grpc.unary_unary_rpc_method_handler(call)
    return grpc.method_handlers_generic_handler(status.SERVICE, {status.CALL: handler})


def _diff_handler(root: Path, containerd: Path) -> grpc.GenericRpcHandler:
    # NB: that there is no Apply has containerd use its own.
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        with _as_status(context, differ.CALL):
            metadata = context.invocation_metadata()
            return differ.diff(
                containerd, root, request, metadata, is_wanted=context.is_active
            )

    handler: Any = grpc.unary_unary_rpc_method_handler(
        call,
        request_deserializer=CLASSES["DiffRequest"].FromString,
        response_serializer=CLASSES["DiffResponse"].SerializeToString,
    )
    return grpc.method_handlers_generic_handler(differ.SERVICE, {differ.CALL: handler})


@contextmanager
def serving(
    root: StrPath,
    address: StrPath,
    options: LazyOptions | None = None,
    *,
    mode: Mode = DEFAULT_MODE,
    containerd: StrPath | None = None,
) -> Iterator[grpc.Server]:
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
            handlers = [_handlers(_Service(snapshots)), _status_handler(snapshots)]
            if containerd is not None:
                handlers.append(_diff_handler(snapshots_root, Path(containerd)))
            server = _start(path, handlers)
            try:
                # Not before: containerd tries to connect seldom.
                snapshots.start()
                yield server
            finally:
                server.stop(_STOP_S).wait()
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


def _start(path: Path, handlers: list[grpc.GenericRpcHandler]) -> grpc.Server:
    _make_room(path)
    server = grpc.server(
        ThreadPoolExecutor(_WORKERS, thread_name_prefix="snapshotter"),
        handlers=handlers,
    )
    mask = os.umask(0o177)
    try:
        bound = server.add_insecure_port(f"unix:{path}")
    except RuntimeError:
        bound = 0
    finally:
        os.umask(mask)
    if not bound:
        raise BtrfsUblkError(
            f"cannot listen at {path}", hint="its directory must be writable"
        )
    server.start()
    return server


def _make_root(root: Path) -> Path:
    """Make the directory of snapshots; it may be a symbolic link of this user's.
    Returns the directory."""
    what, hint = "directory of snapshots", "name another one: --root DIRECTORY"
    check_way(root, what=what, hint=hint)
    return make_private(follow_own_link(root), what=what, hint=hint)


def _make_room(path: Path) -> None:
    """Make the directory of a socket, and remove one that a killed process has left.

    NB: gRPC takes the place of any socket, also of one that somebody listens on.
    """
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
