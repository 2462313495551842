"""A client of the snapshotter, and one with sealed images in a registry."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.devices import new_btrfs
from support.lazy_images import Image, Place, place_fixture

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.containers.messages import CALLS, CLASSES, KIND_NAMES, SERVICE
from btrfs_ublk.containers.service import serving
from btrfs_ublk.containers.status import Status, ask
from btrfs_ublk.containers.store import SNAPSHOT_REF

TIMEOUT_S = 60


class Client:
    """One method for each call that has more than a key."""

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        snapshotter: str = "btrfs-ublk",
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """``metadata`` names the namespace, where containerd is at the other end."""
        self._channel = channel
        self._snapshotter = snapshotter
        self._options = {"timeout": TIMEOUT_S, "metadata": metadata}

    def call(self, name: str, /, **fields: Any) -> Any:
        """Make a call with the fields of its request; return the response, or a list
        of all responses of a stream."""
        request, response = CALLS[name]
        codec = {
            "request_serializer": CLASSES[request].SerializeToString,
            "response_deserializer": CLASSES[response].FromString,
        }
        path = f"/{SERVICE}/{name}"
        asked = CLASSES[request](snapshotter=self._snapshotter, **fields)
        if name == "List":
            stream = self._channel.unary_stream(path, **codec)
            return list(stream(asked, **self._options))
        return self._channel.unary_unary(path, **codec)(asked, **self._options)

    def prepare(
        self, key: str, parent: str = "", labels: Mapping[str, str] | None = None
    ) -> Path:
        """Return the directory that a new active snapshot is mounted from."""
        made = self.call("Prepare", key=key, parent=parent, labels=labels or {})
        (mount,) = made.mounts
        assert mount.type == "bind" and list(mount.options) == ["rbind", "rw"]
        return Path(mount.source)

    def commit(self, name: str, key: str, **fields: Any) -> None:
        self.call("Commit", name=name, key=key, **fields)

    def remove(self, key: str) -> None:
        self.call("Remove", key=key)

    def info(self, key: str) -> Any:
        return self.call("Stat", key=key).info

    def names(self, *filters: str) -> dict[str, str]:
        """Return the kinds of all snapshots, by name."""
        return {
            info.name: KIND_NAMES[info.kind]
            for response in self.call("List", filters=filters)
            for info in response.info
        }


@contextmanager
def connected(socket: Path) -> Iterator[Client]:
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        grpc.channel_ready_future(channel).result(timeout=TIMEOUT_S)
        yield Client(channel)


@contextmanager
def served(root: Path, *settings: Any, **options: Any) -> Iterator[Client]:
    """Run a snapshotter beside its root, and yield a client of it."""
    socket = root.with_suffix(".sock")
    with serving(root, socket, *settings, **options), connected(socket) as client:
        yield client


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


EXISTS = grpc.StatusCode.ALREADY_EXISTS


place = place_fixture(ROOT, BTRFS, LOOP, FUSE)


@pytest.fixture
def root(place: Place, test_root: Path) -> Iterator[Path]:
    with new_btrfs(test_root, size_bytes=1 << 30) as mount:
        try:
            yield mount / "root"
        finally:
            place.take_down()


def state(root: Path) -> Status:
    return ask(root.with_suffix(".sock"))


def ask_for(client: Client, key: str, parent: str, labels: dict[str, str]) -> Any:
    """Prepare as containerd does for a layer; return the status code, None for OK."""
    try:
        client.call("Prepare", key=key, parent=parent, labels=labels)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAVAILABLE:  # it was killed
            raise
        return error.code()
    return None


def pull(client: Client, image: Image, *, who: str = "a") -> str:
    """Get all layers of an image as containerd does, and return the last snapshot."""
    parent = ""
    for number, target in enumerate(image.chain):
        labels = image.labels(number)
        assert ask_for(client, f"{who}/{number} {target}", parent, labels) == EXISTS
        wanted = f'labels."{SNAPSHOT_REF}"=={target},parent=="{parent}"'
        (parent,) = client.names(wanted)
    return parent
