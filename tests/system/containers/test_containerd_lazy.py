"""Containers of a real containerd that start from sealed images, by way of CRI."""

import hashlib
import os
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import containers
from support.containers import (  # noqa: F401
    BUSYBOX,
    NAME,
    TIMEOUT_S,
    Host,
    asks_again,
    configuration,
    connected,
    host,
    is_containerd_2,
    state,
)
from support.lazy_images import Place, some_layers
from support.needs import inapplicable
from support.waiting import wait_until

from btrfs_ublk.errors import CommandError
from btrfs_ublk.image.pull import NotSealedError, look_up
from btrfs_ublk.image.reference import parse_reference
from btrfs_ublk.image.transfer import open_repository
from btrfs_ublk.volume import list_volumes

place = containers.place  # a fixture
lazy_host = containers.lazy_host  # a fixture

pytestmark = pytest.mark.device


@pytest.mark.parametrize("kind, mode", [("sealed", "overlay"), ("index", "snapshot")])
def test_pods_run_from_images_that_arrive_lazily(
    place: Place, lazy_host: Host, kind: str, mode: str  # noqa: F811
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
    host.trust(place.registry.host, place.registry.ca_file)
    host.configuration = configuration(pause.name)
    host.options = ["--ca-file", place.registry.ca_file, "--writable=256M"]
    host.options += ["--require-lazy=all"]
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


def test_the_ctr_of_containerd_2_pulls_lazily(
    place: Place, lazy_host: Host  # noqa: F811
) -> None:
    host = lazy_host  # noqa: F811
    if not is_containerd_2():
        inapplicable("the ctr of containerd 1 fetches layers before it unpacks them")
    shell = {"bin/sh": Path("/bin/busybox").read_bytes()}
    lower, upper = some_layers()
    image = place.push("team/app", lower | shell, upper)
    place.lose_layers(image)
    certs = host.trust(place.registry.host, place.registry.ca_file)
    host.configuration = configuration("none")
    host.options = ["--ca-file", place.registry.ca_file, "--writable=256M"]
    here = ("--snapshotter", NAME)
    with host.snapshotter(), host.containerd():
        host.ctr("images", "pull", "--hosts-dir", certs, *here, image.name)
        assert state(host).layers[image.name] == {"lazy": 2, "ordinary": 0}
        said = host.ctr(
            "run",
            "--rm",
            *here,
            image.name,
            "one",
            "/bin/sh",
            "-c",
            "cat /etc/name; sha256sum /big",
        )
        assert said.startswith("upper\n" + hashlib.sha256(lower["big"]).hexdigest())
        host.ctr("images", "remove", "--sync", image.name)
        wait_until(lambda: not list_volumes(), timeout_s=TIMEOUT_S)


def test_what_was_not_fetched_is_fetched_for_a_push_or_an_export(
    place: Place, lazy_host: Host, tmp_path: Path  # noqa: F811
) -> None:
    """As docs/how-to/containerd.md says it; containerd itself fetches nothing then."""
    host = lazy_host  # noqa: F811
    shell = {"bin/sh": Path("/bin/busybox").read_bytes()}
    image = place.push("team/app", shell, {"etc/name": b"app\n"})
    ca_file = place.registry.ca_file
    hosts = host.trust(place.registry.host, ca_file)
    host.configuration = configuration(image.name)
    host.options = ["--ca-file", ca_file, "--writable=256M", "--require-lazy=all"]
    archive = tmp_path / "app.tar"
    plain, whole = (f"{place.registry.host}/copies/{x}:1" for x in ("plain", "whole"))
    push = ("images", "push", "--hosts-dir", hosts)
    fetch = ("content", "fetch", "--hosts-dir", hosts)
    platform = ("--platform", "linux/amd64")
    # The transfer service of containerd 2 pushes the index of all platforms as well,
    # and its ctr may end before an export is complete.
    is_2 = is_containerd_2()
    local = ("--local",) if is_2 else ()
    export: tuple[str | Path, ...]
    export = ("images", "export", *local, *platform, archive, image.name)
    push_one = (*push, *local, *platform, plain, image.name)

    def ctr(*words: str | Path) -> str:
        return host.ctr("--namespace", "k8s.io", *words)

    def sealed(name: str) -> str:
        reference = parse_reference(name)
        with open_repository(reference, place.access) as repository:
            return look_up(reference, repository)[2].digest

    with host.snapshotter(), host.containerd():
        with connected(host.work / "containerd.sock") as cri:
            wait_until(cri.is_ready, timeout_s=TIMEOUT_S)
            cri.pull(image.name)
            # For containerd 2, a registry mounts what another repository of it has.
            for words in (export,) if is_2 else (export, push_one):
                with pytest.raises(CommandError, match="content digest .* not found"):
                    ctr(*words)
            ctr(*fetch, *platform, image.name)
            ctr(*export)
            with tarfile.open(archive) as tar:
                there = set(tar.getnames())
            assert {f"blobs/{x.replace(':', '/')}" for x in image.blobs} <= there
            ctr(*push_one)
            with pytest.raises(NotSealedError):
                sealed(plain)
            # All that its name has, the sealed image as well.
            if not is_2:
                with pytest.raises(CommandError, match="content digest .* not found"):
                    ctr(*push, whole, image.name)
            ctr(*fetch, "--all-platforms", image.name)
            ctr(*push, whole, image.name)
            assert sealed(whole) == image.sealed
            assert state(host).layers[image.name] == {"lazy": 2, "ordinary": 0}
            cri.remove_image(image.name)
            wait_until(lambda: not list_volumes(), timeout_s=TIMEOUT_S)
