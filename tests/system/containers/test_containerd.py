"""Containers of a real containerd, on our snapshots."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import containers
from support.containers import IMAGE, NAME, TIMEOUT_S, Host
from support.processes import stop
from support.waiting import wait_until

host = containers.host  # a fixture
image = containers.image  # a fixture

pytestmark = pytest.mark.device


def test_a_container_runs_on_a_snapshot(host: Host, image: Path) -> None:
    with host.snapshotter(), host.containerd():
        host.ctr("images", "import", "--snapshotter", NAME, image)
        assert sorted(host.snapshots().values()) == ["Committed", "Committed"]
        script = "cat /etc/name; echo new > /etc/new; ls /etc"
        words = host.ctr(
            *("run", "--rm", "--snapshotter", NAME, IMAGE, "one"),
            *("/bin/sh", "-c", script),
        )
        assert words.split() == ["upper", "name", "new"]
        assert sorted(host.snapshots().values()) == ["Committed", "Committed"]
        host.ctr("images", "remove", "--sync", IMAGE)
        wait_until(lambda: not host.snapshots(), timeout_s=TIMEOUT_S)
        directory = host.root / "snapshots"
        wait_until(lambda: not os.listdir(directory), timeout_s=TIMEOUT_S)


def test_a_container_survives_its_snapshotter(host: Host, image: Path) -> None:
    wait = "until [ -e /go ]; do sleep 0.1; done; cat /etc/name"
    with ExitStack() as stack:
        with host.snapshotter() as process:
            stack.enter_context(host.containerd())
            host.ctr("images", "import", "--snapshotter", NAME, image)
            container = subprocess.Popen(
                host.ctr_command(
                    *("run", "--rm", "--snapshotter", NAME, IMAGE, "one"),
                    *("/bin/sh", "-c", wait),
                ),
                stdout=subprocess.PIPE,
            )
            stack.callback(stop, container)
            wait_until(lambda: "RUNNING" in host.ctr("tasks", "list"), timeout_s=60)
            process.kill()
            process.wait(TIMEOUT_S)
        (host.work / "snapshotter.sock").unlink()
        (active,) = _active_directories(host.root)
        with host.snapshotter():
            # containerd tries again after some seconds.
            wait_until(host.answers, timeout_s=TIMEOUT_S)
            (active / "go").touch()
            words, _ = container.communicate(timeout=TIMEOUT_S)
            assert (container.returncode, words) == (0, b"upper\n")
            wait_until(lambda: len(host.snapshots()) == 2, timeout_s=TIMEOUT_S)
            # containerd forgets a snapshot before it asks for its removal.
            directory = host.root / "snapshots"
            wait_until(lambda: len(os.listdir(directory)) == 2, timeout_s=TIMEOUT_S)


def _active_directories(root: Path) -> list[Path]:
    return [path for path in (root / "snapshots").iterdir() if os.access(path, os.W_OK)]
