"""Layers of what has changed in a snapshot, for containerd's diff service, version 1.

containerd by itself compares two trees file by file. Where times have no fractions of a
second, as in most images, it reads each file that has kept its size and time, so that
all data of a lazy image would arrive. Here the kernel says what has changed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NoReturn, cast

import grpc

from btrfs_ublk.containers.messages import CLASSES
from btrfs_ublk.containers.store import RefusedError
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.btrfs import is_subvolume, nested_subvolumes, subvolume_uuids
from btrfs_ublk.kernel.send import changed_paths

SERVICE = "containerd.services.diff.v1.Diff"
CALL = "Diff"
WRITE = "/containerd.services.content.v1.Content/Write"
_UPDATE = "/containerd.services.content.v1.Content/Update"
_CREATE_LEASE = "/containerd.services.leases.v1.Leases/Create"
#: enum WriteAction
_ACTION_WRITE, _ACTION_COMMIT = 1, 2
#: Names of what a call has beside its message.
_NAMESPACE, _LEASE = "containerd-namespace", "containerd-lease"
#: Label of a layer: the digest of its tar.
_DIFF_ID = "containerd.io/uncompressed"
#: How long containerd keeps a layer until somebody has to refer to it.
_KEPT = timedelta(minutes=10)
_TYPES = (
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
)
_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 3600.0


class _WhileWanted:
    """A file to write to, as long as somebody waits for what is written."""

    def __init__(self, out: IO[bytes], is_wanted: Callable[[], bool]) -> None:
        self._out = out
        self._is_wanted = is_wanted

    def write(self, data: bytes) -> int:
        _check_wanted(self._is_wanted)
        return self._out.write(data)


def _check_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise RefusedError("UNAVAILABLE", "nobody waits for the layer any more")


def diff(
    containerd: Path,
    root: Path,
    request: Any,
    metadata: Iterable[tuple[str, Any]],
    *,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Any:
    """Answer a call, whose ``metadata`` these are: store a layer with the containerd at
    a socket, unless it is wanted no more. Raises BtrfsUblkError; RefusedError for all
    but views of a snapshot below ``root`` and of the one that it was made of, which
    containerd compares itself."""
    from btrfs_ublk.image.commit import CompressedLayer
    from btrfs_ublk.image.layer import changes_between, write_layer

    left, right = _shown(root, request.left), _shown(root, request.right)
    if subvolume_uuids(right)[1] != subvolume_uuids(left)[0]:
        _leave_it(f"{right} is no snapshot of {left}")
    for one in (left, right):
        # NB: a snapshot has empty directories in the place of those of its parent.
        if nested_subvolumes(one):
            _leave_it(f"{one} has subvolumes of its own")
    media_type = request.media_type or _TYPES[0]
    if media_type not in _TYPES or request.HasField("source_date_epoch"):
        _leave_it("layers are compressed by gzip, and have the times of their files")
    lease = ""
    try:
        found = changed_paths(right, left)
        changes = changes_between(right, left, found.paths, found.attributes)
        with TemporaryFile(dir=root) as file:
            out = cast(IO[bytes], _WhileWanted(file, is_wanted))
            compressed = CompressedLayer(out, "gzip")
            write_layer(right, changes, cast(IO[bytes], compressed))
            compressed.finish()
            made = CLASSES["Descriptor"](media_type=media_type, size=file.tell())
            file.seek(0)
            made.digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
            file.seek(0)
            labels = {**request.labels, _DIFF_ID: compressed.diff_id}
            passed = tuple((key, x) for key, x in metadata if key == _NAMESPACE)
            with grpc.insecure_channel(f"unix:{containerd}") as channel:
                lease = _lease(channel, passed)
                leased = (*passed, (_LEASE, lease))
                ref = request.ref or lease
                _store(channel, file, made.digest, ref, labels, leased, is_wanted)
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot make a layer of {right}: {error.strerror}"
        ) from error
    except grpc.RpcError as error:
        message = f"containerd at {containerd} takes no layer: {error.details()}"
        # Somebody else writes it, and who asks tries again, without end. NB: a socket
        # that nobody listens at has this code, too.
        if lease and error.code() is grpc.StatusCode.UNAVAILABLE:
            raise RefusedError("UNAVAILABLE", message) from error
        raise BtrfsUblkError(message) from error
    return CLASSES["DiffResponse"](diff=made)


def _leave_it(why: str) -> NoReturn:
    """containerd asks the next one then: itself."""
    raise RefusedError("UNIMPLEMENTED", why)


def _shown(root: Path, mounts: Sequence[Any]) -> Path:
    """Return the read-only subvolume that mounts show."""
    if len(mounts) == 1 and mounts[0].type == "bind" and "ro" in mounts[0].options:
        path = Path(mounts[0].source)
        if path.is_relative_to(root) and is_subvolume(path):
            return path
    _leave_it("it is no view of a snapshot that is served here")


def _lease(channel: grpc.Channel, passed: tuple[tuple[str, Any], ...]) -> str:
    """Make a lease for a layer: containerd would remove at once what nobody refers to,
    and passes on no lease of its client."""
    lease = f"btrfs-ublk-{os.urandom(8).hex()}"
    until = (datetime.now(UTC) + _KEPT).strftime("%Y-%m-%dT%H:%M:%SZ")
    create: Any = channel.unary_unary(
        _CREATE_LEASE, CLASSES["CreateRequest"].SerializeToString
    )
    create(
        CLASSES["CreateRequest"](id=lease, labels={"containerd.io/gc.expire": until}),
        metadata=passed,
        timeout=_TIMEOUT_S,
    )
    return lease


def _store(
    channel: grpc.Channel,
    file: IO[bytes],
    digest: str,
    ref: str,
    labels: dict[str, str],
    passed: tuple[tuple[str, Any], ...],
    is_wanted: Callable[[], bool],
) -> None:
    """Have containerd store a layer."""

    def requests() -> Iterator[Any]:
        make, offset = CLASSES["WriteContentRequest"], 0
        while data := file.read(_CHUNK_BYTES):
            yield make(action=_ACTION_WRITE, ref=ref, offset=offset, data=data)
            offset += len(data)
        yield make(
            action=_ACTION_COMMIT, ref=ref, offset=offset, total=offset, labels=labels
        )  # NB: where it expects a digest that is there, the lease does not get that.

    write: Any = channel.stream_stream(
        WRITE, CLASSES["WriteContentRequest"].SerializeToString
    )
    try:
        written = write(requests(), metadata=passed, timeout=_TIMEOUT_S)
        for _ in written:
            if not is_wanted():
                written.cancel()  # else containerd keeps the reference locked
                _check_wanted(is_wanted)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
            raise
        # A client that has only fetched it did not know this, and others need it.
        update: Any = channel.unary_unary(
            _UPDATE, CLASSES["UpdateContentRequest"].SerializeToString
        )
        request = CLASSES["UpdateContentRequest"]()
        request.info.digest = digest
        request.info.labels[_DIFF_ID] = labels[_DIFF_ID]
        request.update_mask.paths.append(f"labels.{_DIFF_ID}")
        update(request, metadata=passed, timeout=_TIMEOUT_S)
