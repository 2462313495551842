"""What a server's threads have given up: privileges, and system calls."""

import errno
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from support.needs import Serve

from btrfs_ublk.kernel.waiting import wait_until
from btrfs_ublk.server import Description, LazySegment
from btrfs_ublk.units import MIB

#: linux/capability.h
DAC_READ_SEARCH, IPC_LOCK = 1 << 2, 1 << 14
#: And KILL, SETGID, SETUID, SYS_RESOURCE.
SPAWN = IPC_LOCK | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 24
#: And DAC_OVERRIDE, SYS_PTRACE, SYS_ADMIN.
MAIN = SPAWN | DAC_READ_SEARCH | 1 << 1 | 1 << 19 | 1 << 21
#: What each role is refused, besides what all but "main" are.
ALWAYS = {
    "namespace",
    "unshare",
    "mount",
    "ptrace",
    "chown",
    "mknod",
    "chroot",
    "setuid",
    "bpf",
    "module",
}
REFUSED = {
    "io": ALWAYS | {"open", "socket", "thread", "program"},
    "fetch": ALWAYS | {"program"},
    "helpers": ALWAYS,
    "spawn": ALWAYS - {"setuid"},
}


@pytest.mark.parametrize("role", REFUSED)
def test_calls_that_are_refused(sanitized_build: Path, role: str) -> None:
    done = subprocess.run(
        [sanitized_build / "csrc/tests/confine-shell", role],
        capture_output=True,
        text=True,
        timeout=30,
        # It would trace the process, and start a thread for that.
        env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert done.returncode == 0, done.stderr
    found = {
        name: int(number) for name, number in map(str.split, done.stdout.splitlines())
    }
    refused = {name for name, number in found.items() if number == errno.EPERM}
    assert refused == REFUSED[role]
    assert {number for name, number in found.items() if name not in refused} == {0}


def status_of(thread: Path) -> dict[str, str]:
    lines = (thread / "status").read_text().splitlines()
    return {
        name: value.strip()
        for name, _, value in (line.partition(":") for line in lines)
    }


def ours(tasks: Path) -> list[Path]:
    """All threads but the kernel's, for what the first thread has asked of io_uring:
    these run no code of ours, and system calls are none of their ways.
    """
    found = []
    for thread in tasks.iterdir():
        with suppress(OSError):  # it has ended
            if not (thread / "comm").read_text().startswith("iou-wrk-"):
                found.append(thread)
    return found


def test_threads_of_a_server(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each front end, all that strangers' bytes get to."""
    monkeypatch.setenv("BTRFS_UBLK_FETCH", "process")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    segment = LazySegment(
        offset=0, length=MIB, map=str(tmp_path / "map"), cache=str(cache)
    )
    with serve(Description(MIB, [segment])) as server:
        tasks = Path(f"/proc/{server.pid}/task")

        def all_have_begun() -> list[tuple[Path, dict[str, str]]]:
            """Each thread confines itself, before it does anything else."""
            found = []
            for thread in ours(tasks):
                with suppress(OSError):  # it has ended
                    found.append((thread, status_of(thread)))
            others = [
                status for thread, status in found if thread.name != tasks.parent.name
            ]
            return found if all(x["Seccomp"] == "2" for x in others) else []

        names = set()
        for thread, status in wait_until(
            all_have_begun, timeout_s=30, what="threads that are not confined"
        ):
            names.add(status["Name"])
            assert status["NoNewPrivs"] == "1", status["Name"]
            held = int(status["CapEff"], 16)
            assert held == int(status["CapPrm"], 16)
            if thread.name == str(server.pid):
                assert not held & ~MAIN, f"{held:x}"
            elif status["Name"] == "spawner":
                assert not held & ~SPAWN, f"{held:x}"
            else:
                assert not held & ~(DAC_READ_SEARCH | IPC_LOCK), f"{held:x}"
        expected = {"fetcher", "fetch-worker", "mirror-worker", "cache", "spawner"}
        assert expected <= names
