"""What a server of snapshots tells of itself, over the socket of containerd's calls."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from btrfs_ublk.errors import BtrfsUblkError

#: A service of our own beside containerd's. Its answer is JSON: the fields of Status.
SERVICE, CALL = "btrfs_ublk.Snapshotter", "Status"
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Status:
    root: str
    version: str  # of the package that serves
    snapshots: Mapping[str, int]  # how many there are of each kind
    used_bytes: int | None  # what all of them are charged for; None without quotas
    #: By reference, as far as CRI has told it: how many of an image's layers are "lazy"
    #: and how many "ordinary".
    layers: Mapping[str, Mapping[str, int]]
    fallbacks: Mapping[
        str, int
    ]  # by reason: layers that were not lazy, since the start
    images: Sequence[Mapping[str, Any]]  # a SealedStatus each

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def ask(path: Path) -> Status:
    """Ask the server at a socket, for at most ten seconds. Raises BtrfsUblkError when
    none answers."""
    _check_listening(path)
    with grpc.insecure_channel(f"unix:{os.path.abspath(path)}") as channel:
        call: Any = channel.unary_unary(f"/{SERVICE}/{CALL}")
        try:
            answer = call(b"", timeout=_TIMEOUT_S)
            return Status(**json.loads(answer))
        except grpc.RpcError as error:
            raise BtrfsUblkError(
                f"no snapshotter answers at {path}: {error.details()}",
                hint="is it one of btrfs-ublk? its log says more",
            ) from error
        except (TypeError, ValueError) as error:
            raise BtrfsUblkError(
                f"what answers at {path} is no snapshotter of this version",
                hint="restart it after an upgrade",
            ) from error


def _check_listening(path: Path) -> None:
    """Raise BtrfsUblkError unless somebody listens. NB: gRPC would say it at length."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_TIMEOUT_S)
        try:
            asking.connect(os.fspath(path))
        except OSError as error:
            hint = (
                "start it: systemctl start btrfs-ublk-snapshotter, or "
                f"btrfs-ublk snapshotter serve --socket {path}"
            )
            if isinstance(error, PermissionError):
                hint = "only its owner may ask it, which is root as a rule"
            elif path.exists() and not path.is_socket():
                hint = "it is no socket: name that of `snapshotter serve`"
            raise BtrfsUblkError(
                f"no snapshotter answers at {path}: {error.strerror or error}",
                hint=hint,
            ) from error
