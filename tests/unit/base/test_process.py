"""run() and spawn(): messages, deadlines, and children that do not outlive us."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from btrfs_ublk.base.ledger import Entry
from btrfs_ublk.base.process import (
    Child,
    ProcessIdentity,
    RunningServer,
    launch,
    run,
    spawn,
)
from btrfs_ublk.errors import CommandError
from btrfs_ublk.kernel.waiting import wait_until
from btrfs_ublk.server.front_end import end_server


def test_a_deadline_kills_the_whole_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    start_s = time.monotonic()
    with pytest.raises(CommandError, match="did not end within 2 s"):
        run(["sh", "-c", f"sleep 60 & echo $! > {pid_file}; wait"], timeout_s=2.0)
    assert time.monotonic() - start_s < 30
    grandchild = int(pid_file.read_text())
    with suppress(ProcessLookupError):
        assert ProcessIdentity.of(grandchild).wait(timeout_s=10)


@contextmanager
def without_first_thread() -> Iterator[Child]:
    """A process whose first thread has ended, while another one sleeps."""
    script = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with spawn([sys.executable, "-c", script], pipe_stdout=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        stat = Path(f"/proc/{child.pid}/stat")
        wait_until(
            lambda: ") Z " in stat.read_text(), timeout_s=30, what="a first thread"
        )
        yield child


@pytest.mark.parametrize(
    ("end", "signum"),
    [
        (lambda identity: identity.stop(timeout_s=30), signal.SIGTERM),
        (lambda identity: RunningServer(identity).kill(), signal.SIGKILL),
        (
            lambda identity: end_server(
                Entry(1, "server", "tag", {"server": asdict(identity)}), timeout_s=30
            ),
            signal.SIGTERM,
        ),
    ],
    ids=["identity", "running", "ledger"],
)
def test_the_last_thread_is_ended(
    end: Callable[[ProcessIdentity], bool], signum: signal.Signals
) -> None:
    with without_first_thread() as child:
        assert end(child.identity)
        assert child.wait(30) == -signum


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    script = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    with spawn(["sh", "-c", script], stop_timeout_s=0.3, pipe_stdout=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    assert not child.identity.is_alive()


@pytest.mark.parametrize("ours", [True, False], ids=["child", "identity"])
def test_what_is_stopped_ends_in_order(ours: bool) -> None:
    script = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done"
    with spawn(["sh", "-c", script], pipe_stdout=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        if ours:
            child.stop(timeout_s=60)
        else:
            assert child.identity.stop(timeout_s=60)
        assert time.monotonic() - start_s < 30
        assert child.wait(60) == 7


def test_a_child_that_cannot_be_watched_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No descriptor is left for its pidfd, say."""
    started: list[int] = []

    def fail(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Too many"):
        launch(["sleep", "60"], pipe_stdout=True)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_children_die_with_a_killed_parent() -> None:
    script = (
        "from btrfs_ublk.base.process import spawn\n"
        "with spawn(['sleep', '60']) as child:\n"
        "    print(child.pid, flush=True)\n"
        "    child.wait(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = ProcessIdentity.of(int(parent.stdout.readline()))
        # The child is setpriv until it has asked for its death signal.
        comm = Path(f"/proc/{child.pid}/comm")
        wait_until(lambda: b"sleep" in comm.read_bytes(), timeout_s=60, what="no sleep")
        parent.kill()
    assert child.wait(timeout_s=10)


def test_an_identity_is_not_fooled_by_another_process() -> None:
    own = ProcessIdentity.of_self()
    assert own.is_alive()
    assert not ProcessIdentity(own.pid, own.start_ticks - 1).is_alive()
    # Not ours to stop either.
    assert ProcessIdentity(own.pid, own.start_ticks - 1).stop(timeout_s=1)
