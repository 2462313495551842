"""A snapshotter with sealed images in a registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.lazy_images import Image, Place, lazy_place
from support.loops import new_btrfs
from support.needs import Need
from support.registry_server import REGISTRY
from support.snapshotter_client import Client

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.containers.status import Status, ask
from btrfs_ublk.containers.store import SNAPSHOT_REF

EXISTS = grpc.StatusCode.ALREADY_EXISTS


@pytest.fixture
def place(
    need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    need(ROOT, BTRFS, LOOP, FUSE, REGISTRY)
    with lazy_place(sparse_path, monkeypatch) as found:
        yield found


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
