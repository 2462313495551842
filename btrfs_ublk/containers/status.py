"""What a server of snapshots tells of itself, over the socket of containerd's calls."""

from __future__ import annotations

import json
import os
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


def ask(socket: Path) -> Status:
    """Ask the server at a socket, for at most ten seconds. Raises BtrfsUblkError when
    none answers."""
    with grpc.insecure_channel(f"unix:{os.path.abspath(socket)}") as channel:
        call: Any = channel.unary_unary(f"/{SERVICE}/{CALL}")
        try:
            answer = call(b"", timeout=_TIMEOUT_S)
            return Status(**json.loads(answer))
        except grpc.RpcError as error:
            raise BtrfsUblkError(
                f"no snapshotter answers at {socket}: {error.details()}",
                hint="start it: btrfs-ublk snapshotter serve",
            ) from error
        except (TypeError, ValueError) as error:
            raise BtrfsUblkError(
                f"what answers at {socket} is no snapshotter of this version",
                hint="restart it after an upgrade",
            ) from error
