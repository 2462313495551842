"""Containers of a real containerd, on our snapshots."""

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


@pytest.mark.containerd2
@pytest.mark.parametrize("mode", ["snapshot", "overlay"])
def test_a_container_has_a_user_namespace(host: Host, image: Path, mode: str) -> None:
    """No file is changed for that: its mount has other IDs."""
    if not containers.is_containerd_2():
        pytest.skip("containerd 1 changes the owner of each file")
    host.options += ["--mode", mode]
    for path in (host.work, host.work.parent):  # runc goes there without privileges
        path.chmod(0o711)
    with host.snapshotter(), host.containerd():
        host.ctr("images", "import", "--snapshotter", NAME, image)
        script = "cat /proc/self/uid_map; echo x > /etc/new; stat -c %u:%g / /etc/new"
        words = host.ctr(
            *("run", "--uidmap", "0:100000:65536", "--gidmap", "0:200000:65536"),
            *("--remap-labels", "--snapshotter", NAME, IMAGE, "one"),
            *("/bin/sh", "-c", script),
        )
        assert words.split() == ["0", "100000", "65536", "0:0", "0:0"]
        assert sorted(host.snapshots().values()) == ["Active", "Committed", "Committed"]
        (active,) = _active_directories(host.root)
        status = (active / "etc/new").stat()
        assert (status.st_uid, status.st_gid) == (0, 0)
        host.ctr("containers", "delete", "one")


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
