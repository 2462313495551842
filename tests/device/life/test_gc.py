"""gc: removes what a killed process made, all of it, and nothing else."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices import abandon, any_command, attach_again, detach, enter
from support.system_state import SystemState
from support.waiting import wait_until

from btrfs_ublk.base.gc import collect
from btrfs_ublk.base.ledger import boot_id, state_directory
from btrfs_ublk.base.process import ProcessIdentity, run
from btrfs_ublk.kernel import loop_device
from btrfs_ublk.kernel.mountinfo import read_mountinfo

pytestmark = pytest.mark.usefixtures("in_process")

#: Makes a directory, a loop device on a file system in it, and a mount; then waits.
VICTIM = """
import sys, time
from pathlib import Path
from typing import Any
from btrfs_ublk.base.process import run
from btrfs_ublk.kernel import loop_device, mounted, tempdir
with tempdir(parent=Path(sys.argv[1])) as directory:
    target = directory / "mnt"
    target.mkdir()
    image = directory / "image"
    with image.open("wb") as file:
        file.truncate(128 << 20)
    run(["mkfs.btrfs", "-q", image], timeout_s=60)
    with loop_device(image) as device, mounted(device.path, target):
        print(target, device.path, flush=True)
        time.sleep(60)
"""


@pytest.fixture
def leftovers(sparse_path: Path) -> Iterator[tuple[Path, Path]]:
    """The mount point and the loop device that a killed process left."""
    argv = [sys.executable, "-c", VICTIM, str(sparse_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        target, device = victim.stdout.readline().split()
        victim.kill()
    assert any(mount.target == Path(target) for mount in read_mountinfo())
    yield Path(target), Path(device)
    assert collect().is_clean


def results(**arguments: Any) -> list[tuple[str, str]]:
    return [
        (outcome.entry.kind, outcome.result)
        for ledger in collect(**arguments).ledgers
        for outcome in ledger.outcomes
    ]


def test_what_is_busy_stays_and_is_removed_later(
    leftovers: tuple[Path, Path], state_of_system: Callable[[], SystemState]
) -> None:
    """The youngest first. A dry run changes nothing."""
    target, device = leftovers
    before = state_of_system()
    kinds = [kind for kind, result in results(dry_run=True)]
    assert kinds == ["mount", "loop", "tempdir"]
    assert state_of_system() == before
    with subprocess.Popen(["sleep", "60"], cwd=target) as user:
        report = collect()
        user.kill()
    assert not report.is_clean
    text = json.dumps(report.to_dict())
    assert f"pid {user.pid} (sleep)" in text and f"mount target={target}" in text
    done = any_command("gc")
    assert done.returncode == 0
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["removed", "mount"],
        ["removed", "loop"],
        ["removed", "tempdir"],
    ]
    done = any_command("gc")
    assert (done.returncode, done.stdout) == (0, "nothing to remove\n")


def test_what_someone_else_made_meanwhile_is_left(leftovers: tuple[Path, Path]) -> None:
    """Same mount point, same loop device, same file: but not the ones we made."""
    target, device = leftovers
    run(["umount", target], timeout_s=30)
    detach(device)
    attach_again(device, target.parent / "image")
    run(["mount", device, target], timeout_s=30)
    assert results() == [("mount", "gone"), ("loop", "gone"), ("tempdir", "left")]
    assert any(mount.target == target for mount in read_mountinfo())
    run(["umount", target], timeout_s=30)
    detach(device)


def test_a_living_process_keeps_its_things(sparse_path: Path) -> None:
    image = sparse_path / "image"
    image.write_bytes(bytes(4096))
    with loop_device(image) as device:
        assert results() == []
        assert run(["losetup", "-n", device.path], timeout_s=10).stdout


def test_two_at_once(leftovers: tuple[Path, Path]) -> None:
    argv = [sys.executable, "-m", "btrfs_ublk.cli.main", "gc", "--json"]
    processes = [
        subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    reports = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    things = [t for r in reports for ledger in r["ledgers"] for t in ledger["things"]]
    assert sorted(thing["result"] for thing in things) == ["removed"] * 3


def test_leftovers_that_stay_are_a_failure() -> None:
    path = state_directory() / "7-future.ledger"
    entry = {"enter": 1, "kind": "hologram", "tag": "0" * 16, "details": {}}
    header = {"version": 1, "boot_id": boot_id()}
    path.write_text(json.dumps(header) + "\n" + json.dumps(entry) + "\n")
    done = any_command("gc")
    path.unlink()
    assert done.returncode == 1
    assert "left         hologram" in done.stdout and "newer" in done.stdout
    assert any_command("gc", "--no-such-option").returncode == 2


def test_a_mount_namespace_that_exists_keeps_its_mounts(
    sparse_path: Path, tmp_path: Path
) -> None:
    """The process that mounted is dead, another one is still where the mount is."""
    target = sparse_path / "mnt"
    target.mkdir()
    script = (
        "import os, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from btrfs_ublk.kernel import mounted\n"
        "with mounted('none', Path(sys.argv[1]), fs_type='tmpfs'):\n"
        "    other = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "    print(os.getpid(), other.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        ["unshare", "--mount", sys.executable, "-c", script, str(target)],
        stdout=subprocess.PIPE,
        text=True,
    ) as victim:
        assert victim.stdout is not None
        _, other = map(int, victim.stdout.readline().split())
        victim.kill()
    assert not any(mount.target == target for mount in read_mountinfo())
    try:
        report = collect()
    finally:
        identity = ProcessIdentity.of(other)
        assert identity.stop(timeout_s=10)
    (outcome,) = report.ledgers[0].outcomes
    assert outcome.result == "left" and f"pid {other} is in it" in str(outcome.reason)
    wait_until(lambda: not Path(f"/proc/{other}/ns/mnt").exists())
    assert results() == [("mount", "gone")]


def test_what_a_killed_process_has_started_is_waited_for(
    sparse_path: Path, tmp_path: Path
) -> None:
    """While its command still runs, the mount may yet come to be: gc keeps off."""
    target, started, go = (tmp_path / name for name in ("mnt", "started", "go"))
    target.mkdir()
    # Its own child mounts, and gets no death signal: slower than any kernel would be.
    slow = tmp_path / "slow"
    slow.write_text(f"""#!/bin/sh
(touch {started}; while ! test -e {go}; do sleep 0.02; done; exec /bin/mount "$@") &
wait
""")
    slow.chmod(0o755)
    script = (
        "import sys\n"
        "from btrfs_ublk.base.ledger import process_ledger\n"
        "from btrfs_ublk.base.process import run\n"
        "slow, at = sys.argv[1:]\n"
        "ledger = process_ledger()\n"
        "ledger.enter('mount', target=at, sources=['none'], fs_type='tmpfs')\n"
        "words = [slow, '-t', 'tmpfs', 'none', at]\n"
        "run(words, timeout_s=60, keep_open_fds=[ledger.fileno()])\n"
    )
    argv = [sys.executable, "-c", script, str(slow), str(target)]
    with subprocess.Popen(argv) as victim:
        wait_until(started.exists)
        victim.kill()
    assert results(lock_timeout_s=0.2) == [("mount", "left")]
    threading.Timer(0.2, go.touch).start()
    assert results() == [("mount", "removed")]


@pytest.mark.device  # it looks into the loop devices that there are
def test_gc_knows_all_kinds(tmp_path: Path) -> None:
    """Also those of benchmarks, which nobody else imports."""
    kinds = ["loop", "ublk-device", "foreign-ublk-device"]
    for number, kind in enumerate(kinds):
        abandon(tmp_path, {**enter(number, "x", kind), "details": {}})
        code = (
            "import sys; from pathlib import Path\n"
            "from btrfs_ublk.base.gc import collect\n"
            "[ledger] = collect(Path(sys.argv[1])).ledgers\n"
            "[outcome] = ledger.outcomes; print(outcome.reason)"
        )
        argv = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.stdout == "None\n", done
