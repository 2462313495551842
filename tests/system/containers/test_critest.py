"""The cases of images and containers that Kubernetes has for container runtimes
(critest of sigs.k8s.io/cri-tools), on our snapshotter and on containerd's overlayfs.

scripts/containerd builds critest.
"""

import os
import subprocess
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from support.containers import (  # noqa: F401
    BUSYBOX,
    NAME,
    TIMEOUT_S,
    Host,
    configuration,
    connected,
    host,
    is_containerd_2,
    state,
)
from support.kubelet import WAIT, busybox_layer, mirror_everything, write_network
from support.lazy_images import Place, place_fixture
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, Program
from btrfs_ublk.volume import list_volumes

pytestmark = [pytest.mark.device, pytest.mark.containerd2, pytest.mark.timeout(900)]

CRITEST = Program("critest", "of sigs.k8s.io/cri-tools: scripts/containerd builds it")
#: It takes 40 s, and more than 200 where others use the CPUs.
LIMIT_S = 700
OVERLAYFS = "overlayfs"
_FOCUS = r"\[k8s.io\] (Image|Container|Multiple Containers|Idempotence)"
#: The first wants an image whose digest it knows, the others a network between pods.
_SKIP = "public image with digest|should support network"
#: What containerd 1.6 fails as well with its overlayfs, the last one now and then.
_SKIP_1 = r"Idempotence Stop\w+ should not return an error if not found|OOMKilled"
#: So many cases pass at least, also with containerd 1.6, which has no image volumes.
_ENOUGH = 40


place = place_fixture(ROOT, BTRFS, LOOP, FUSE, BUSYBOX, CRITEST)


def _push_images(place: Place) -> tuple[str, str]:
    """Push all images that the cases want. Returns the sandbox's and the one that most
    containers are of, which are sealed."""
    system = busybox_layer()
    shell = ["/bin/sh"]
    for name, user in (
        ("user-uid", "1002"),
        ("user-username", "www-data"),
        ("user-uid-group", "1003:users"),
        ("user-username-group", "www-data:www-data"),
        ("predefined-group", "1000"),
    ):
        repository = f"k8s-staging-cri-tools/test-image-{name}"
        place.push_plain(repository, system, tag="latest", User=user, Cmd=shell)
    for name, tags in (
        ("latest", ["latest"]),
        ("tag", ["test", "all"]),
        ("1", ["latest"]),
        ("2", ["latest"]),
        ("3", ["latest"]),
        ("tags", ["1", "2", "3"]),
    ):
        repository = f"k8s-staging-cri-tools/test-image-{name}"
        own = {"etc/image": name.encode()}
        for tag in tags:
            place.push_plain(repository, system, own, tag=tag, Cmd=shell)
    place.push_plain("pause", system, tag="3.9", Cmd=WAIT)
    serve = ["/bin/sh", "-c", "echo httpd; exec httpd -f -h /www"]
    place.push_plain("e2e-test-images/httpd", system, tag="2.4.39-4", Cmd=serve)
    pause = place.push("sealed/pause", busybox_layer("pause"), Cmd=WAIT)
    image = place.push("sealed/busybox", busybox_layer("sealed"), Cmd=shell)
    return pause.name, image.name


def _results(report: Path) -> dict[str, list[str]]:
    """Return the names of the cases that passed, failed, and said that they do not
    apply; not of those that were not asked for."""
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in xml.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if not case.attrib["name"].startswith("[It]"):
            continue
        if skipped is None or skipped.get("message") != "skipped":
            found.setdefault(case.attrib["status"], []).append(case.attrib["name"])
    return found


def _run(host: Host, image: str) -> dict[str, list[str]]:  # noqa: F811
    images, report = host.work / "images.yaml", host.work / "report.xml"
    skip = _SKIP if is_containerd_2() else f"{_SKIP}|{_SKIP_1}"
    images.write_text(f"defaultTestContainerImage: {image}\n")
    done = subprocess.run(
        [
            *host.entering(),
            *("timeout", "--kill-after=5", str(LIMIT_S), CRITEST.name),
            f"--runtime-endpoint=unix://{host.work}/containerd.sock",
            *(f"--test-images-file={images}", f"--ginkgo.junit-report={report}"),
            *(f"--ginkgo.focus={_FOCUS}", f"--ginkgo.skip={skip}"),
            "--ginkgo.no-color",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)  # shown when the test fails
    return _results(report)


@pytest.mark.parametrize("snapshotter", [OVERLAYFS, "snapshot", "overlay"])
def test_its_cases_pass(
    place: Place, host: Host, snapshotter: str  # noqa: F811
) -> None:
    """Most containers are of a sealed image; the other images are ordinary ones."""
    pause, image = _push_images(place)
    write_network(host)
    mirror_everything(host, place)
    host.configuration = configuration(pause)
    host.options = ["--ca-file", place.registry.ca_file, "--writable=256M"]
    host.options += ["--require-lazy"]
    if snapshotter == OVERLAYFS:
        text = host.configuration
        host.configuration = text.replace(f'"{NAME}"', f'"{OVERLAYFS}"')
    else:
        host.options += ["--mode", snapshotter]

    def ctr(*words: str) -> list[str]:
        return host.ctr("--namespace", "k8s.io", *words).split()

    with host.snapshotter(), host.containerd():
        with connected(host.work / "containerd.sock") as cri:
            wait_until(cri.is_ready, timeout_s=TIMEOUT_S)
            found = _run(host, image)
            layers, fallbacks = state(host).layers, state(host).fallbacks
            for pod in cri.pods():  # of cases that failed
                cri.remove_pod(pod)
            for name in ctr("images", "list", "--quiet"):
                ctr("images", "remove", "--sync", name)
            wait_until(lambda: not list_volumes(), timeout_s=TIMEOUT_S)
            snapshots = host.root / "snapshots"
            wait_until(lambda: not os.listdir(snapshots), timeout_s=TIMEOUT_S)
    print(found)
    assert (found["failed"], len(found["passed"]) >= _ENOUGH) == ([], True)
    if snapshotter != OVERLAYFS:
        assert layers[image] == layers[pause] == {"lazy": 1, "ordinary": 0}
        assert fallbacks == {}
