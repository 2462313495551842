"""Find the processes that keep a mount busy."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from btrfs_ublk.base.signals import deferred
from btrfs_ublk.kernel.mountinfo import read_mountinfo


def pids_using(directory: Path, *, limit: int = 20) -> dict[int, str]:
    """Find at most ``limit`` processes that have something open at or below a directory
    and so keep a mount busy: pid to "pid 12 (bash): working directory /mnt/x/y".

    An open file of a mount there counts even if no path leads to it: it may have been
    opened by its inode number. Processes that this one may not look into are not found
    (proc_pid_fd(5)). Mapped files are only found while they are open, too.
    """
    with deferred():
        import psutil  # Few commands need it, and importing it takes time.

    found: dict[int, str] = {}
    mounted = {
        mount.mount_id: mount.target
        for mount in read_mountinfo()
        if mount.target.is_relative_to(directory)
    }
    for process in psutil.process_iter(["name"]):
        base = Path("/proc", str(process.pid))
        uses = {"cwd": "working directory", "root": "root directory", "exe": "program"}
        with suppress(OSError):
            uses |= {f"fd/{fd}": "has open" for fd in os.listdir(base / "fd")}
        for link, use in uses.items():
            with suppress(OSError):
                what = os.readlink(base / link)
                if not Path(what).is_relative_to(directory):
                    if not mounted or not link.startswith("fd/"):
                        continue
                    target = mounted.get(_mount_id(base, link.removeprefix("fd/")))
                    if target is None:
                        continue
                    what = f"what no path leads to, in the mount at {target}"
                name = process.info["name"]
                found[process.pid] = f"pid {process.pid} ({name}): {use} {what}"
                break
        if len(found) >= limit:
            break
    return found


def _mount_id(process: Path, fd: str) -> int:
    """Return the mount id of a file that a process has open (proc_pid_fdinfo(5))."""
    text = (process / "fdinfo" / fd).read_text(errors="replace")
    for line in text.splitlines():
        if line.startswith("mnt_id:"):
            return int(line.partition(":")[2])
    return -1  # The kernel does not say it.
