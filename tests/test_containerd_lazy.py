"""Containers of a real containerd that start from sealed images, by way of CRI."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import Need
from cri_client import connected
from lazy_images import Place, lazy_place, some_layers
from registry_server import REGISTRY
from test_containerd import BUSYBOX, NAME, TIMEOUT_S, Host, host  # noqa: F401
from waiting import wait_until

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.containers.status import Status, ask
from btrfs_ublk.errors import CommandError
from btrfs_ublk.volume import list_volumes

pytestmark = pytest.mark.native

_CONFIGURATION = """
version = 2
root = "{work}/root"
state = "{work}/state"
[grpc]
  address = "{work}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "%(pause)s"
  restrict_oom_score_adj = true
  stream_server_port = "0"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{work}/cni"
  conf_dir = "{work}/cni"
[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = "{work}/certs.d"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "btrfs-ublk"
  disable_snapshot_annotations = false
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
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


def state(of: Host) -> Status:
    return ask(of.work / "snapshotter.sock")


def asks_again(of: Host) -> bool:
    """Whether containerd is connected again: it has to ask for what a namespace has."""
    with suppress(CommandError):
        of.ctr("--namespace", "k8s.io", "snapshots", "--snapshotter", NAME, "list")
        return True
    return False


@pytest.mark.parametrize("kind, mode", [("sealed", "overlay"), ("index", "snapshot")])
def test_pods_run_from_images_that_arrive_lazily(
    place: Place,
    lazy_host: Host,  # noqa: F811
    kind: str,
    mode: str,
) -> None:
    """containerd fetches no layer; of sealed images, the registry has none any more. A
    container reads on while the snapshotter is dead and the registry is away."""
    host = lazy_host  # noqa: F811
    shell = {"bin/sh": Path("/bin/busybox").read_bytes()}
    lower, upper = some_layers()
    pause = place.push("k8s/pause", shell, Cmd=["/bin/sh", "-c", "exec sleep 3600"])
    place.lose_layers(pause)
    if kind == "sealed":
        image = place.push("team/app", lower | shell, upper)
        place.lose_layers(image)
    else:
        image = place.push_plain("team/app", lower | shell, upper)
        place.index(image)
    ca_file = place.registry.ca_file
    hosts = host.work / "certs.d" / place.registry.host
    hosts.mkdir(parents=True)
    (hosts / "hosts.toml").write_text(
        f'[host."https://{place.registry.host}"]\nca = "{ca_file}"\n'
    )
    host.configuration = _CONFIGURATION % {"pause": pause.name}
    host.options = ["--ca-file", ca_file, "--writable=256M", "--require-lazy=all"]
    host.options += ["--mode", mode, "--indexes"]
    wait = ("/bin/sh", "-c", "while sleep 1; do :; done")

    def digest(name: str) -> str:
        data = (lower | upper)[name]
        return f"{hashlib.sha256(data).hexdigest()}  /{name}\n"

    with host.snapshotter() as process, host.containerd():
        with connected(host.work / "containerd.sock") as cri, ExitStack() as pods:
            wait_until(cri.is_ready, timeout_s=TIMEOUT_S)
            cri.pull(image.name)
            listed = host.ctr("--namespace", "k8s.io", "content", "list", "--quiet")
            assert listed and not set(listed.split()) & set(image.blobs)
            pod = pods.enter_context(cri.pod("pod"))
            one = cri.run(pod, image.name, "one", *wait)
            assert cri.shell(one, "cat /etc/name; sha256sum /big") == (
                "upper\n" + digest("big")
            )
            assert state(host).layers == {
                pause.name: {"lazy": 1, "ordinary": 0},
                image.name: {"lazy": 2, "ordinary": 0},
            }
            assert state(host).fallbacks == {}
            assert cri.shell(one, "grep -c '^overlay / ' /proc/mounts || true") == (
                "1\n" if mode == "overlay" else "0\n"
            )
            print([(x["ready_s"], x["fetched_bytes"]) for x in state(host).images])
            fetched = {x["volume"]: x["fetched_bytes"] for x in state(host).images}
            process.kill()
            process.wait(TIMEOUT_S)
            assert cri.shell(one, "sha256sum /other") == digest("other")
            cri.shell(one, "echo kept > /kept")
            (host.work / "snapshotter.sock").unlink()
            place.stop_registry()
            with host.snapshotter():
                wait_until(lambda: asks_again(host), timeout_s=TIMEOUT_S)
                wait_until(
                    lambda: all(x["is_up"] for x in state(host).images),
                    timeout_s=TIMEOUT_S,
                )
                after = {x["volume"]: x["fetched_bytes"] for x in state(host).images}
                assert sum(after.values()) > sum(fetched.values())
                two = cri.run(pod, image.name, "two", *wait)
                for name in ("big", "other"):
                    assert cri.shell(two, f"sha256sum /{name}") == digest(name)
                assert cri.shell(one, "cat /kept") == "kept\n"
                assert not cri.shell(two, "ls / | grep kept || true")
                pods.close()
                for name in (image.name, pause.name):
                    cri.remove_image(name)
                wait_until(lambda: not list_volumes(), timeout_s=TIMEOUT_S)
                assert os.listdir(host.root / "images") == []
