"""What containers and all that serves them use: CPU time, and memory."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Set
from pathlib import Path

import psutil
from many_devices import pss_bytes

from btrfs_ublk.bench.cpu import RawSnapshot, children_of
from btrfs_ublk.device import show_device
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.volume.store import volume_directories

#: Servers give back what they do not need at rest within this time.
_REST_S = 5.0
#: By the name of a process; what is not named here is a container's, or no part of it.
_NAMES = {"containerd": "containerd", "containerd-shim": "shims"}
#: Of /proc/meminfo.
_CACHED, _SLAB = ("Cached", "Buffers"), ("Slab", "KernelStack", "PageTables", "Percpu")
WEIGHED = ("snapshotter", "daemon", "servers", "containerd", "shims", "slab", "cache")


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


def weigh(idle: str) -> dict[str, int]:
    """Return bytes by what has them, when all is at rest: Pss of processes, which
    counts once what they share, the kernel's objects (slab), and files in memory
    (cache). The daemon is that of the device ``idle``, too."""
    time.sleep(_REST_S)
    kinds: dict[int, str] = {}
    for name in (idle, *(each.name for each in volume_directories())):
        state = show_device(name).state
        if state.server is None or state.supervisor is None:
            raise BtrfsUblkError(f"the device {name} is not served")
        kinds |= {state.supervisor.pid: "daemon"}
        if name != idle:
            kinds[state.server.pid] = "servers"
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or ()
        if "snapshotter" in words and "serve" in words:
            kinds[process.pid] = "snapshotter"
        elif found := [y for x, y in _NAMES.items() if process.info["name"] == x]:
            kinds[process.pid] = found[0]
    found_bytes = Counter(dict.fromkeys(WEIGHED, 0))
    for pid, kind in kinds.items():
        found_bytes[kind] += pss_bytes(pid)
    lines = Path("/proc/meminfo").read_text().splitlines()
    kernel = {x.split(":")[0]: int(x.split()[1]) << 10 for x in lines}
    found_bytes["slab"] = sum(kernel[name] for name in _SLAB)
    # Disks and volumes are in memory, and no cache.
    found_bytes["cache"] = sum(kernel[name] for name in _CACHED) - kernel["Shmem"]
    return dict(found_bytes)
