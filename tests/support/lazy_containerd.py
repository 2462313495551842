"""A containerd whose images arrive lazily, by way of CRI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.containerd import BUSYBOX, NAME, Host, is_containerd_2
from support.cri_client import CONFIGURATION
from support.lazy_images import Place, lazy_place
from support.needs import Need
from support.registry_server import REGISTRY

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.containers.status import Status, ask
from btrfs_ublk.errors import CommandError

#: The configuration of containerd 2, in place of that of the client.
_CONFIGURATION_2 = """
version = 3
root = "{work}/root"
state = "{work}/state"
[grpc]
  address = "{work}/containerd.sock"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "btrfs-ublk"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "%(pause)s"
[plugins."io.containerd.cri.v1.images".registry]
  config_path = "{work}/certs.d"
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_port = "0"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{work}/cni"]
  conf_dir = "{work}/cni"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""


@pytest.fixture
def place(
    need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    need(ROOT, BTRFS, LOOP, FUSE, REGISTRY, BUSYBOX)
    with lazy_place(sparse_path, monkeypatch) as found:
        yield found


@pytest.fixture
def lazy_host(place: Place, host: Host) -> Iterator[Host]:  # noqa: F811
    yield host
    place.take_down()


def configuration(pause: str) -> str:
    text = _CONFIGURATION_2 if is_containerd_2() else CONFIGURATION
    return text % {"pause": pause}


def state(of: Host) -> Status:
    return ask(of.work / "snapshotter.sock")


def asks_again(of: Host) -> bool:
    """Whether containerd is connected again: it has to ask for what a namespace has."""
    with suppress(CommandError):
        of.ctr("--namespace", "k8s.io", "snapshots", "--snapshotter", NAME, "list")
        return True
    return False
