"""What a report contains: one function for each file."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from btrfs_ublk.base.gc import collect as collect_garbage
from btrfs_ublk.base.process import run
from btrfs_ublk.device import device_map, list_devices, show_device
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.ops.doctor import diagnose
from btrfs_ublk.ops.versions import find_versions
from btrfs_ublk.server.features import kernel_features
from btrfs_ublk.supervision.client import DaemonDirectory
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
_SOURCES = 20
_OF_INTEREST = re.compile(
    r"(?i)btrfs|ublk|\bloop\d*\b|\bfuse\b|io_uring|hung task|blocked for more than"
    r"|Oops|BUG:|Call Trace|I/O error|out of memory"
)
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
    yield "kernel.log", _kernel_log
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
    client = device_map(name)
    sources = list(islice(client.sources(), _SOURCES))
    return {"stats": client.stats(), "sources": sources}


def _machine() -> Content:
    memory = psutil.virtual_memory()
    return {
        "uname": platform.uname()._asdict() | {"node": "-"},
        "os": platform.freedesktop_os_release().get("PRETTY_NAME"),
        "command_line": Path("/proc/cmdline").read_text().strip(),
        "cpus": os.cpu_count(),
        "memory_bytes": memory.total,
        "available_bytes": memory.available,
        "user": os.geteuid(),
    }


def _environment() -> Content:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if _VARIABLES.fullmatch(name)
    }


def _kernel_log() -> Content:
    text = run(["dmesg", "--color=never"], timeout_s=_TIMEOUT_S).stdout
    lines = [line for line in text.splitlines() if _OF_INTEREST.search(line)]
    return "\n".join(lines[-_KERNEL_LINES:])


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
