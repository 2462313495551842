"""The process that answers requests about volumes (docs/design/protocol.md), each in a
thread of its own: python -m btrfs_ublk.volume.answers FD

FD is a socket of the daemon (supervision/volume_requests.py), from which requests come,
each with its connection. It ends with that, when all are answered. Commands call
answer() as well, and so nothing is imported that only some requests need.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from btrfs_ublk.base.log import log, setup_logging
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.mount import mount_namespace
from btrfs_ublk.supervision.volume_requests import VOLUME_REQUESTS, error_reply
from btrfs_ublk.volume.report import list_volumes, show_volume
from btrfs_ublk.volume.texts import fork_text, forks_text, volume_text, volumes_text

_MAX_BYTES = 1 << 16
#: A reply is sent in packets of this size, which all programs can read.
_PACKET_BYTES = 8192
_REPLY_TIMEOUT_S = 10.0
_MOST_AT_ONCE = 16
#: How long a request waits for others that change the same volume.
_TURN_S = 30.0
_PR_SET_IO_FLUSHER = 57
#: The types of all keys but "request".
_TYPES = {"quota_bytes": int, "files": bool}

#: Requests that change a volume take turns: its lock is polled for. Each is here as
#: long as somebody uses it.
_turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
_turns_lock = threading.Lock()


@dataclass(frozen=True)
class _Answer:
    """``keys`` are for programs; ``text`` makes what the command prints, as JSON or
    not. ``exit_status`` is the command's."""

    keys: dict[str, Any]
    text: Callable[[bool], str] = lambda as_json: ""
    exit_status: int = 0


@contextmanager
def _turn(volume: str) -> Iterator[None]:
    """Let one request at a time change a volume. Raises BtrfsUblkError."""
    with _turns_lock:
        lock = _turns.setdefault(volume, threading.Lock())
    if not lock.acquire(timeout=_TURN_S):
        raise BtrfsUblkError(
            f"others are changing volume {volume!r}", hint="try again later"
        )
    try:
        yield
    finally:
        lock.release()


def _list(*, files: bool = True, base: str | None = None) -> _Answer:
    found = list_volumes(base=base, files=files)
    return _Answer(
        {"volumes": [each.to_dict() for each in found]},
        lambda as_json: volumes_text(found, as_json=as_json),
    )


def _status(*, volume: str, files: bool = True, base: str | None = None) -> _Answer:
    found = show_volume(volume, base=base, files=files)
    return _Answer(
        {"volume": found.to_dict()},
        lambda as_json: volume_text(found, as_json=as_json),
        0 if found.is_up else 1,
    )


def _fork(
    *,
    volume: str,
    fork: str,
    mode: str = "overlay",
    quota_bytes: int | None = None,
    layer: str | None = None,
    base: str | None = None,
) -> _Answer:
    from btrfs_ublk.volume.definition import FORK_MODES
    from btrfs_ublk.volume.image import fork_image

    known = next((each for each in FORK_MODES if each == mode), None)
    if known is None:
        raise UsageError(f"there is no mode {mode!r}", hint=" or ".join(FORK_MODES))
    with _turn(volume):
        path = fork_image(
            *(volume, fork), layer=layer, mode=known, quota_bytes=quota_bytes, base=base
        )
    keys = {"name": volume, "fork": fork, "path": str(path), "mode": mode}
    return _Answer(keys, lambda as_json: fork_text(keys, as_json=as_json))


def _forks(*, volume: str, base: str | None = None) -> _Answer:
    from btrfs_ublk.volume.image import forks_of_image

    with _turn(volume):
        found = forks_of_image(volume, base=base)
    return _Answer(
        {"forks": [each.to_dict() for each in found]},
        lambda as_json: forks_text(found, as_json=as_json),
    )


def _drop(*, volume: str, fork: str, base: str | None = None) -> _Answer:
    from btrfs_ublk.volume.image import unfork_image

    with _turn(volume):
        unfork_image(volume, fork, base=base)
    return _Answer({"name": volume, "fork": fork, "result": "removed"})


def _snapshot(*, volume: str, snapshot: str, base: str | None = None) -> _Answer:
    from btrfs_ublk.volume.snapshots import snapshot_volume

    with _turn(volume):
        return _Answer(dict(vars(snapshot_volume(volume, snapshot, base=base))))


_functions: Mapping[str, Callable[..., _Answer]] = dict(
    zip(VOLUME_REQUESTS, (_list, _status, _fork, _forks, _drop, _snapshot), strict=True)
)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a request, and return the reply. Raises UsageError, BtrfsUblkError."""
    keys = dict(request)
    name, output = keys.pop("request"), keys.pop("output", None)
    keys.pop("if_ready", None)
    if keys.pop("namespace", mount_namespace()) != mount_namespace():
        raise UsageError(
            "the daemon runs in another mount namespace, and sees other mounts"
        )
    function = _functions[name]
    optional = function.__kwdefaults__ or {}
    known = [key for key in function.__annotations__ if key != "return"]
    keys = {key: value for key, value in keys.items() if value is not None}
    for key, value in keys.items():
        if key not in known:
            raise UsageError(
                f"request {name!r} has no key {key!r}",
                hint=f"it has {', '.join(known)}",
            )
        if type(value) is not _TYPES.get(key, str):
            raise UsageError(f"{key} cannot be {value!r}")
    for key in known:
        if key not in keys and key not in optional:
            raise UsageError(f"request {name!r} needs the key {key!r}")
    if not os.path.isabs(keys.get("base", "/")):
        raise UsageError(f"base {keys['base']!r} is not absolute")
    found = function(**keys)
    if output is None:
        return found.keys
    return {"output": found.text(output == "json"), "exit_status": found.exit_status}


def reply_to(request: Mapping[str, Any]) -> dict[str, Any]:
    """Do as answer(), but return errors as well."""
    try:
        return answer(request)
    except BtrfsUblkError as error:
        return error_reply(error)
    except OSError as error:
        return error_reply(BtrfsUblkError(str(error)))
    except Exception as error:
        log.exception("a request that fails")
        return error_reply(BtrfsUblkError(repr(error)))


def _serve(message: bytes, fds: list[int], places: threading.BoundedSemaphore) -> None:
    try:
        with socket.socket(fileno=fds[0]) as connection, suppress(OSError):
            reply = json.dumps(reply_to(json.loads(message))).encode()
            connection.settimeout(_REPLY_TIMEOUT_S)
            for start in range(0, len(reply), _PACKET_BYTES):
                connection.send(reply[start : start + _PACKET_BYTES])
    finally:
        places.release()


def _be_ordinary() -> None:
    """Give up what makes the daemon special (device/endurance.py)."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")
    ctypes.CDLL(None).prctl(_PR_SET_IO_FLUSHER, 0, 0, 0, 0)


def main() -> None:
    """Run as the module's docstring says."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    setup_logging()
    _be_ordinary()
    places = threading.BoundedSemaphore(_MOST_AT_ONCE)
    while True:
        places.acquire()
        flags = socket.MSG_CMSG_CLOEXEC
        message, fds, *_ = socket.recv_fds(requests, _MAX_BYTES, 1, flags)
        if not message:
            return  # The others are waited for.
        arguments = (message, list(fds), places)
        threading.Thread(target=_serve, args=arguments).start()


if __name__ == "__main__":
    main()
