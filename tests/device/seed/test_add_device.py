"""The process that adds a device to a seed: nobody ends it by accident.

A kill of it stops the machine (docs/upstream.md), so what kills is
only done in a virtual machine, or where the file system is no seed.
"""

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.children import sprouts
from support.needs import Need, inapplicable, share_of
from support.system_state import SystemState
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import BTRFS_PROGS, MKFS_BTRFS, Helper
from btrfs_ublk.base.gc import collect
from btrfs_ublk.base.helpers import ADD_DEVICE, MKSEED, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.kernel import loop_device, mounted
from btrfs_ublk.kernel.btrfs import add_device
from btrfs_ublk.kernel.mount import Mount
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.units import MIB

pytestmark = pytest.mark.data

TIMEOUT_S = 60.0
KILLED = share_of(100)
SEED = 20261122


@pytest.fixture
def plain(need: Need, sparse_path: Path) -> Iterator[Mount]:
    """An ordinary btrfs, mounted."""
    need(MKFS_BTRFS, BTRFS_PROGS, Helper(ADD_DEVICE))
    image, target = sparse_path / "plain.img", sparse_path / "mnt"
    target.mkdir()
    with image.open("xb") as file:
        file.truncate(256 * MIB)
    run(["mkfs.btrfs", "-q", image], timeout_s=TIMEOUT_S)
    with loop_device(image) as loop, mounted(loop.path, target) as mount:
        yield mount


@pytest.fixture
def more(plain: Mount, sparse_path: Path) -> Iterator[Path]:
    """A device to add to it."""
    image = sparse_path / "more.img"
    with image.open("xb") as file:
        file.truncate(256 * MIB)
    with loop_device(image) as loop:
        yield loop.path
        if plain.target.is_mount():
            run(["umount", plain.target], timeout_s=TIMEOUT_S)


def lowest_oom_score() -> str:
    """-1000, or what it is where CAP_SYS_RESOURCE is missing."""
    script = "echo -1000 2>&- >/proc/self/oom_score_adj; cat /proc/self/oom_score_adj"
    return run(["sh", "-c", script], timeout_s=TIMEOUT_S).stdout


def find_workers(device: Path, besides: int) -> list[psutil.Process]:
    """The helper's processes for that device but for the one that we have started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if ADD_DEVICE in " ".join(words[:1]) and str(device) in words:
            found.append(process)
    return [process for process in found if process.pid != besides]


def waiting_workers(device: Path, besides: int) -> list[psutil.Process]:
    """Those that wait for the frozen file system."""
    found = []
    for process in find_workers(device, besides):
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_DISK_SLEEP:
                found.append(process)
    return found


def test_it_goes_on_when_all_others_are_killed(
    plain: Mount, more: Path, sparse_path: Path
) -> None:
    """In a session of its own, nobody's child, spared by the OOM killer, deaf to what
    can be ignored; and what it inherits stays locked until it has ended.
    """
    lock = sparse_path / "lock"
    with lock.open("w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        run(["fsfreeze", "--freeze", plain.target], timeout_s=TIMEOUT_S)
        try:
            command = subprocess.Popen(
                [helper_path(ADD_DEVICE), more, plain.target],
                pass_fds=[locked.fileno()],
                process_group=0,
            )
            # NB: not the one that only forks it, and ends.
            wait_until(lambda: bool(waiting_workers(more, command.pid)))
            (worker,) = waiting_workers(more, command.pid)
            proc = Path(f"/proc/{worker.pid}")
            assert worker.pid not in {
                child.pid for child in psutil.Process(command.pid).children(True)
            }
            assert os.getsid(worker.pid) not in (os.getsid(0), command.pid)
            assert os.getpgid(worker.pid) != command.pid
            assert (proc / "oom_score_adj").read_text() == lowest_oom_score()
            worker.send_signal(signal.SIGTERM)
            worker.send_signal(signal.SIGINT)
            os.killpg(command.pid, signal.SIGKILL)
            assert command.wait(TIMEOUT_S) == -signal.SIGKILL
            assert worker.is_running()
            locked.close()
            with lock.open() as again, pytest.raises(BlockingIOError):
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            run(["fsfreeze", "--unfreeze", plain.target], timeout_s=TIMEOUT_S)
    with lock.open() as again:
        fcntl.flock(again, fcntl.LOCK_EX)
    show = ["btrfs", "filesystem", "show", plain.target]
    assert str(more) in run(show, timeout_s=TIMEOUT_S).stdout


def test_nothing_keeps_the_mount_busy_when_it_is_done(plain: Mount, more: Path) -> None:
    """It did now and then."""
    source = plain.info().source
    for _ in range(share_of(100)):
        add_device(plain.target, more)
        run(["umount", plain.target], timeout_s=TIMEOUT_S)
        run(["mount", source, plain.target], timeout_s=TIMEOUT_S)
        removal = ["btrfs", "device", "remove", more, plain.target]
        run(removal, timeout_s=TIMEOUT_S)


@pytest.mark.timeout(3600)
def test_sprouting_is_killed_at_any_moment(
    need: Need, sparse_path: Path, state_of_system: Callable[[], SystemState]
) -> None:
    """While the kernel adds the device, what asked for it is killed, and its helper:
    the machine lives, gc leaves nothing, and the next one sprouts.
    """
    if not os.environ.get("BTRFS_UBLK_VM"):
        inapplicable("should it fail, the machine stops: only in a virtual one")
    need(Helper(MKSEED), Helper(ADD_DEVICE))
    chances = random.Random(SEED)
    before = state_of_system()
    in_midst = 0
    with subprocess.Popen(
        [sys.executable, str(sprouts.__file__), str(sparse_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("measure\n")
        process.stdout.readline()
        took_s = float(process.stdout.readline())
        assert process.stdout.readline() == "ended\n"
        for number in range(KILLED):
            process.stdin.write("\n")
            pid = int(process.stdout.readline())
            time.sleep(chances.uniform(0, took_s))
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                helpers = psutil.Process(pid).children()
                os.kill(pid, signal.SIGKILL)
                for helper in helpers:
                    helper.kill()
            lines = [process.stdout.readline()]
            while lines[-1] != "ended\n":
                lines.append(process.stdout.readline())
            in_midst += len(lines) == 1
            report = collect()
            assert report.is_clean, report.to_dict()
            if number % 10 == 0 or number == KILLED - 1:
                assert loops_below(sparse_path) == [], f"round {number}"
    print(f"{KILLED} killed, {in_midst} of them while the device was added, {took_s} s")
    assert in_midst >= KILLED // 3
    assert state_of_system().mounts == before.mounts
    assert list(sparse_path.iterdir()) == []
