"""What a report contains: one function for each file."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from btrfs_ublk.base.gc import collect as collect_garbage
from btrfs_ublk.base.process import run
from btrfs_ublk.device import device_map, list_devices, show_device
from btrfs_ublk.device.daemon import DaemonDirectory
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.ops.doctor import diagnose
from btrfs_ublk.ops.versions import find_versions
from btrfs_ublk.server.features import kernel_features
from btrfs_ublk.volume.report import list_volumes

#: Text, or what JSON can hold.
Content = str | dict[str, Any] | list[Any]
#: The name in the report, and the function that makes its content.
Item = tuple[str, Callable[[], Content]]

_TIMEOUT_S = 20.0
#: A command of a dead process may still hold its ledger; it is not waited for.
_LOCK_TIMEOUT_S = 1.0
_LOG_BYTES = 64 << 10
_KERNEL_LINES = 1000
_MAPPINGS = 200
_SOURCES = 20
_MODULES = ("btrfs", "ublk_drv", "fuse", "loop")
_OF_INTEREST = re.compile(
    r"(?i)btrfs|ublk|\bloop\d*\b|\bfuse\b|io_uring|hung task|blocked for more than"
    r"|Oops|BUG:|Call Trace|I/O error|out of memory"
)
#: How our block devices look: see server/fuse.py and server/ublk.py.
_OUR_BACKING_FILE = "/btrfs-ublk-"
#: The environment variables that affect our programs; no others are collected.
_VARIABLES = re.compile(
    r"(?i)BTRFS_UBLK_.*|(?:https?|no|all)_proxy|TMPDIR|PATH|LANG|TERM"
)


def items() -> Iterator[Item]:
    """Yield all items; each device that there is now has its own."""
    yield "versions.json", lambda: find_versions().to_dict()
    yield "doctor.json", lambda: diagnose().to_dict()
    yield "features.json", lambda: kernel_features()[1]
    yield "machine.json", _machine
    yield "environment.json", _environment
    yield "modules.txt", _modules
    yield "kernel.log", _kernel_log
    yield "mounts.json", _mounts
    yield "ledgers.json", _ledgers
    yield "volumes.json", lambda: [volume.to_dict() for volume in list_volumes()]
    try:
        names = [device.name for device in list_devices()]
    except Exception as error:  # the rest is still useful
        why = f"{type(error).__name__}: {error}"
        yield "devices.txt", lambda: why
        names = []
    for name in names:
        yield from _device_items(name)
    if names:
        yield "daemon.log", lambda: _tail(DaemonDirectory.of_host().log)


def _device_items(name: str) -> Iterator[Item]:
    directory = device_directory(name)
    folder = f"devices/{name}"
    yield f"{folder}/device.json", lambda: show_device(name).to_dict()
    yield f"{folder}/log", lambda: _tail(directory.log)
    yield f"{folder}/description.json", lambda: directory.description.read_text()
    yield f"{folder}/map.json", lambda: _map(name)


def _map(name: str) -> Content:
    """Return the map's statistics, first mappings and first sources."""
    client = device_map(name)
    mappings = list(islice(client.list(), _MAPPINGS))
    sources = sorted({mapping.source for mapping in mappings})[:_SOURCES]
    return {
        "stats": client.stats(),
        "mappings": [vars(mapping) for mapping in mappings],
        "sources": [client.show(source=number) for number in sources],
    }


def _machine() -> Content:
    memory = psutil.virtual_memory()
    return {
        "uname": platform.uname()._asdict() | {"node": "-"},
        "os": _os_release(),
        "command_line": Path("/proc/cmdline").read_text().strip(),
        "cpus": os.cpu_count(),
        "memory_bytes": memory.total,
        "available_bytes": memory.available,
        "user": os.geteuid(),
        "container": _container(),
    }


def _os_release() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "?")
    except OSError:
        return "?"


def _container() -> str | None:
    """Return the output of systemd-detect-virt(1); None if it is not installed."""
    if not shutil.which("systemd-detect-virt"):
        return None
    done = run(["systemd-detect-virt"], timeout_s=_TIMEOUT_S, ok_statuses=(0, 1))
    return done.stdout.strip()


def _environment() -> Content:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if _VARIABLES.fullmatch(name)
    }


def _modules() -> Content:
    there = {name: Path("/sys/module", name).is_dir() for name in _MODULES}
    return "\n".join(
        f"{name}: {'there' if found else 'not loaded, or without parameters'}"
        for name, found in there.items()
    )


def _kernel_log() -> Content:
    text = run(["dmesg", "--color=never"], timeout_s=_TIMEOUT_S).stdout
    lines = [line for line in text.splitlines() if _OF_INTEREST.search(line)]
    return "\n".join(lines[-_KERNEL_LINES:])


def _mounts() -> Content:
    """Return mounts of btrfs, and of devices that our servers made."""
    ours = {f"/dev/{name}": str(backing) for name, backing in _our_disks()}
    mounts = [
        asdict(mount) | {"target": str(mount.target)}
        for mount in read_mountinfo()
        if mount.fs_type == "btrfs" or mount.source in ours
    ]
    return {"disks": ours, "mounts": mounts}


def _our_disks() -> Iterator[tuple[str, str]]:
    for disk in sorted(Path("/sys/block").iterdir()):
        if disk.name.startswith("ublkb"):
            yield disk.name, "ublk"
        try:
            backing = (disk / "loop" / "backing_file").read_text().strip()
        except OSError:
            continue
        if _OUR_BACKING_FILE in backing:
            yield disk.name, backing


def _ledgers() -> Content:
    return collect_garbage(dry_run=True, lock_timeout_s=_LOCK_TIMEOUT_S).to_dict()


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - _LOG_BYTES)
        file.seek(start)
        if start:
            # The omitted part may have the name by which a secret is recognised.
            file.readline()
        return file.read().decode(errors="replace")
