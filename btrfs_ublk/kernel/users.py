"""Find the processes that keep a mount or a device busy.

NB: with many volumes up, a machine has thousands of processes, most of them threads of
the kernel, and each command that takes a volume down looks at all of them. So this uses
plain names instead of Path, and reads what it prints only of the processes it found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from btrfs_ublk.kernel.mountinfo import mounts_at_or_below

_USES = {"exe": "program", "cwd": "working directory", "root": "root directory"}


def pids_using(*places: Path, limit: int = 20) -> dict[int, str]:
    """Find at most ``limit`` processes that have something open at or below one of the
    places, which are directories or devices, and so keep a mount or a device busy: pid
    to "pid 12 (bash): working directory /mnt/x/y".

    An open file of a mount there counts even if no path leads to it: it may have been
    opened by its inode number. Processes that this one may not look into are not found
    (proc_pid_fd(5)). Mapped files are only found while they are open, too.
    """
    found: dict[int, str] = {}
    if not places:
        return found
    exact = {str(place) for place in places}
    below = tuple(f"{place.rstrip('/')}/" for place in exact)
    mounted = {each.mount_id: each.target for each in mounts_at_or_below(*places)}
    for pid in pids():
        for link, what in links_of(pid, "cwd", "root"):
            if what not in exact and not what.startswith(below):
                if not mounted or not link.startswith("fd/"):
                    continue
                target = mounted.get(_mount_id(pid, link.removeprefix("fd/")))
                if target is None:
                    continue
                what = f"what no path leads to, in the mount at {target}"
            use = _USES.get(link, "has open")
            found[pid] = f"pid {pid} ({command_of(pid)}): {use} {what}"
            break
        if len(found) >= limit:
            break
    return found


def pids() -> Iterator[int]:
    """Yield the processes that /proc shows."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def links_of(pid: int, *others: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a process's program ("exe"), ``others`` ("cwd", say) and open
    files ("fd/3") below /proc/PID, each with where it leads to. NB: this opens none of
    them, because that may wait for a file system."""
    links = ["exe", *others]
    with suppress(OSError):  # We may not look.
        try:
            os.readlink(f"/proc/{pid}/exe")
        except FileNotFoundError:
            return  # It has ended, or is a thread of the kernel, and has no files.
        links += [f"fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    for link in links:
        with suppress(OSError):
            yield link, os.readlink(f"/proc/{pid}/{link}")


def command_of(pid: int) -> str:
    """Return the name of a process's program, cut to 15 bytes by the kernel."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "has ended"


def _mount_id(pid: int, fd: str) -> int:
    """Return the mount id of a file that a process has open (proc_pid_fdinfo(5))."""
    with suppress(OSError):
        with open(f"/proc/{pid}/fdinfo/{fd}", encoding="utf-8") as file:
            for line in file:
                if line.startswith("mnt_id:"):
                    return int(line.partition(":")[2])
    return -1  # The kernel does not say it.
