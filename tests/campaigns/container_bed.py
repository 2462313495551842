"""A containerd for benchmarks, with all that it needs in one directory."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path

from campaign import environment
from fault_proxy import FaultProxy
from support.containers import (
    BUSYBOX,
    CONFIGURATION,
    CONTAINERD,
    IMAGE,
    NAME,
    RUNC,
    TIMEOUT_S,
    Cri,
    Host,
    connected,
    decode,
    layer,
    write_image,
)
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE, VOLUMES_VARIABLE
from btrfs_ublk.base.process import run
from btrfs_ublk.bench.cpu import RawSnapshot, children_of
from btrfs_ublk.image.store import IMAGES_VARIABLE
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.units import GIB
from btrfs_ublk.volume import down_volume, remove_volume
from btrfs_ublk.volume.store import volume_directories

NEEDS = (ROOT, BTRFS, LOOP, FUSE, CONTAINERD, RUNC, BUSYBOX)
OVERLAYFS = "overlayfs"
_DISK_BYTES = 32 * GIB  # of sparse files
_EXITED = 2  # CONTAINER_EXITED
_RUN_S, _POLL_S = 600.0, 0.005
#: ext4 would write its tables while others are measured.
_MAKE = {"ext4": ["-E", "nodiscard"], "btrfs": []}
_MOUNT = {"ext4": ("noinit_itable",), "btrfs": ()}


@contextmanager
def bed(parent: Path) -> Iterator[Host]:
    """Make what containerd and its overlayfs keep on an ext4, and what our snapshotter
    keeps on a btrfs: each is on a loop device of a file below ``parent``. Volumes,
    images and the policy are there as well."""
    with tempdir(parent=parent) as work, ExitStack() as stack:
        for kind, words in _MAKE.items():
            image, target = work / f"{kind}.image", work / kind
            with image.open("wb") as file:
                file.truncate(_DISK_BYTES)
            run([f"mkfs.{kind}", "-q", *words, image], timeout_s=TIMEOUT_S)
            target.mkdir()
            device = stack.enter_context(loop_device(image))
            disk = mounted(device.path, target, fs_type=kind, options=_MOUNT[kind])
            stack.enter_context(disk)
        run(["mount", "--make-shared", work / "btrfs"], timeout_s=TIMEOUT_S)
        (work / "etc").mkdir()
        (work / "etc/images.toml").write_text('[[allow]]\nfrom = "127.0.0.1:*/*"\n')
        places = {
            VOLUMES_VARIABLE: str(work / "ext4/volumes"),
            IMAGES_VARIABLE: str(work / "ext4/images"),
            CONFIG_VARIABLE: str(work / "etc"),
        }
        stack.enter_context(environment(**places))
        stack.callback(_remove_volumes)
        yield Host(work / "ext4", work / "btrfs/root")


def _remove_volumes() -> None:
    for volume in volume_directories():
        down_volume(volume.name)
        remove_volume(volume.name)


@contextmanager
def running(host: Host) -> Iterator[None]:
    """Run the snapshotter and containerd, whose log is dropped."""
    stdout = sys.stdout
    with redirect_stdout(io.StringIO()), host.snapshotter(), host.containerd():
        wait_until(host.answers, timeout_s=TIMEOUT_S)
        with redirect_stdout(stdout):
            yield


@contextmanager
def pod(host: Host, snapshotter: str, registry: str) -> Iterator[tuple[Cri, str]]:
    """Run containerd with CRI on a snapshotter, and a pod whose containers come from a
    registry without TLS; yields the client and the pod."""
    hosts = host.work / "certs.d" / registry
    hosts.mkdir(parents=True)
    (hosts / "hosts.toml").write_text(f'[host."http://{registry}"]\n')
    text = CONFIGURATION % {"pause": IMAGE}
    host.configuration = text.replace(f'"{NAME}"', f'"{snapshotter}"')
    pause = host.work / "pause.tar"
    wait = b"#!/bin/busybox sh\nexec /bin/busybox sleep 86400\n"
    directories = [(name, None, 0o755) for name in ("bin", "dev", "etc", "proc", "sys")]
    busybox = ("bin/busybox", Path("/bin/busybox").read_bytes(), 0o755)
    write_image(pause, [layer([*directories, busybox, ("bin/sh", wait, 0o755)])])
    with running(host), connected(host.work / "containerd.sock") as cri:
        wait_until(cri.is_ready, timeout_s=TIMEOUT_S)
        words = ("images", "import", "--snapshotter", snapshotter, pause)
        host.ctr("--namespace", "k8s.io", *words)
        with cri.pod("pod") as identifier:
            yield cri, identifier


def run_until_end(cri: Cri, to: str, image: str, name: str, *command: str) -> int:
    """Run a container in a pod, and return its exit status."""
    identifier = cri.run(to, image, name, *command)
    deadline_s = time.monotonic() + _RUN_S
    while True:
        found = decode(cri.call("Runtime", "ContainerStatus", {1: identifier})[1][0])
        if found.get(3) == [_EXITED]:
            return int(found.get(7, [0])[0])
        assert time.monotonic() < deadline_s, "the container has not ended in time"
        time.sleep(_POLL_S)


def _proxy(registry: str, latency_s: float, rate: float, pipe: Connection) -> None:
    host, _, port = registry.partition(":")
    with FaultProxy((host, int(port)), latency_s=latency_s, rate=rate) as proxy:
        pipe.send(proxy.port)
        while pipe.recv():
            pipe.send((proxy.counts.requests, proxy.counts.body_bytes))


@contextmanager
def far(
    registry: str, latency_s: float, rate: float
) -> Iterator[tuple[str, Callable[[], tuple[int, int]]]]:
    """Run a proxy that delays answers, which share a link of that rate, in a process of
    its own; yields its address, and what tells how many requests and bytes it has
    passed on."""
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_proxy, args=(registry, latency_s, rate, its)
    )
    process.start()

    def counts() -> tuple[int, int]:
        ours.send(True)
        requests, size = ours.recv()
        return int(requests), int(size)

    try:
        yield f"127.0.0.1:{ours.recv()}", counts
    finally:
        ours.send(False)
        process.join()


def bystanders(daemon: int) -> set[int]:
    """Return this process and its children, a registry and a proxy, as what they do is
    no part of a host. The daemon is."""
    return {os.getpid(), *children_of(os.getpid())} - {daemon}


def cpu_s(but: Set[int]) -> float:
    """Return the CPU time, in seconds, of all processes of this PID namespace but
    those, and of what they have waited for. ``scripts/isolate`` makes the namespace;
    the kernel's threads are not in it."""
    processes = RawSnapshot.take().parse().processes
    found = (each for pid, each in processes.items() if pid not in but)
    return sum(each.own_s + each.children_s for each in found)
