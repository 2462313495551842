"""The environment of a measurement: kernel, machine, versions, and other load."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import btrfs_ublk
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import CapabilityError, CommandError
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.units import GIB

_TIMEOUT_S = 20.0

#: Set by scripts/vm: "icount" (its clock counts instructions), "tcg" (emulated), "kvm".
VM_VARIABLE = "BTRFS_UBLK_VM"

#: The most cores that others may use in a turn that counts as undisturbed.
QUIET_CORES = 0.3

_VERSIONS = ("kernel", "btrfs_ublk", "revision", "server", "btrfs_progs", "fio")
_IDENTITY = (
    *("kernel", "architecture", "cpu", "cpu_flags", "cpus", "guest", "mitigations"),
    *("file_system", "loop_direct_io", "nice"),
    *("btrfs_ublk", "server", "btrfs_progs", "fio"),
)


def environment(directory: Path) -> dict[str, Any]:
    """Describe the environment for publication: without host name and paths.
    ``directory`` is where the images are.
    """
    memory = psutil.virtual_memory()
    space = os.statvfs(directory)
    cpu = _cpuinfo()
    model = cpu.get("model name") or cpu.get("Model") or platform.processor()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpu": model or "unknown",
        "cpu_flags": (cpu.get("flags") or cpu.get("Features", "")).split(),
        "cpus": len(os.sched_getaffinity(0)),
        "guest": os.environ.get(VM_VARIABLE),
        "memory_bytes": memory.total,
        "file_system": _fs_type(directory),
        "file_system_bytes": space.f_blocks * space.f_frsize,
        "file_system_free_bytes": space.f_bavail * space.f_frsize,
        "loop_direct_io": False,
        "load": list(os.getloadavg()),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "btrfs_ublk": btrfs_ublk.__version__,
        "revision": _revision(),
        "btrfs_progs": _first_line("btrfs", "--version"),
        "fio": _first_line("fio", "--version"),
        "server": _build_id(),
        "mitigations": _mitigations(),
        "python": platform.python_version(),
    }


def environment_id(record: Mapping[str, Any]) -> str:
    """Return twelve digits that depend on what figures depend on, such as kernel, CPU
    and versions, but not on time or load.
    """
    same = {name: record.get(name) for name in _IDENTITY}
    # The kernel reserves a slightly different amount in each boot.
    same["memory"] = round(record["memory_bytes"] / GIB, 1)
    text = json.dumps(same, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def versions(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions of the software, from an environment()."""
    return {name: record.get(name) for name in _VERSIONS}


def _build_id() -> str | None:
    """Return twelve digits of the hash of the server's executable."""
    try:
        program = helper_path(SERVER).read_bytes()
    except CapabilityError:
        return None
    return hashlib.sha256(program).hexdigest()[:12]


def _mitigations() -> dict[str, str]:
    """Return the kernel's mitigations of the flaws that this CPU has."""
    found = {}
    for path in sorted(Path("/sys/devices/system/cpu/vulnerabilities").glob("*")):
        with suppress(OSError):
            state = path.read_text().strip()
            if state != "Not affected":
                found[path.name] = state
    return found


def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first CPU. NB: emulated string instructions are slow, so
    VMs may hide erms among the flags.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = (line.partition(":") for line in reversed(lines))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _fs_type(directory: Path) -> str:
    path = directory.resolve()
    mounts = {mount.target: mount.fs_type for mount in read_mountinfo()}
    return next(mounts[at] for at in (path, *path.parents) if at in mounts)


def _first_line(*argv: str | Path) -> str | None:
    try:
        return run(argv, timeout_s=_TIMEOUT_S).stdout.partition("\n")[0]
    except CommandError:
        return None


def _revision() -> str | None:
    """Return the commit of a checkout: "1a2b3c4", and "+" if files differ from it."""
    package = Path(btrfs_ublk.__file__).parent
    if not (package.parent / ".git").exists():
        return None
    return _first_line(
        *("git", "-C", package, "describe", "--always", "--abbrev=12", "--dirty=+")
    )
