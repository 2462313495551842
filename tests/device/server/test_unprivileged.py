"""ublk devices of a user who is not root: what udev does, the tests do."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.needs import Need
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import UBLK
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.errors import UsageError
from btrfs_ublk.kernel import list_ublk_devices
from btrfs_ublk.server import (
    BlockServer,
    Description,
    PatternSegment,
    choose_front_end,
    device_records,
)
from btrfs_ublk.units import MIB

pytestmark = pytest.mark.ublk

NOBODY = 65534
CONTROL = Path("/dev/ublk-control")
PATTERN = Description(MIB, [PatternSegment(offset=0, length=MIB)])


@pytest.fixture(autouse=True)
def open_driver(need: Need) -> Iterator[None]:
    """Anybody may add devices, as an administrator would have it."""
    need(UBLK)
    mode = stat.S_IMODE(CONTROL.stat().st_mode)
    CONTROL.chmod(0o666)
    yield
    CONTROL.chmod(mode)


@pytest.fixture
def server() -> Iterator[Path]:
    """The program where that user finds it."""
    directory = Path("/tmp", f"btrfs-ublk-{os.getpid()}")
    directory.mkdir(mode=0o755)
    yield Path(shutil.copy(helper_path(SERVER), directory))
    shutil.rmtree(directory)


@contextmanager
def udev() -> Iterator[None]:
    """Gives each new device to its owner, as the rule does."""
    given: set[Path] = set()
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.01):
            for device in list_ublk_devices():
                for path in (device.char_path, device.block_path):
                    if path is not None and path.exists() and path not in given:
                        number = str(device.device_id)
                        words = run_server("--device-owner", number).stdout.split()
                        if len(words) == 2:
                            os.chown(path, *map(int, words))
                            given.add(path)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def run_server(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helper_path(SERVER), *words], capture_output=True, text=True, timeout=60
    )


@contextmanager
def unprivileged(server: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [server, "--unprivileged", "--queues=1", "--tag=abc", *options, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    )
    with process:
        try:
            assert process.stdin is not None
            process.stdin.write(PATTERN.to_json())
            process.stdin.close()
            process.stdin = None
            yield process
        finally:
            process.kill()


def test_a_device_of_ones_own(server: Path) -> None:
    with udev(), unprivileged(server) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        ready: dict[str, Any] = json.loads(line)
        assert ready["unprivileged"] and ready["recovery"] == "none"
        device = Path(ready["device"])
        wait_until(lambda: device.exists() and device.stat().st_uid == NOBODY)
        read = subprocess.run(
            ["dd", f"if={device}", "bs=4096", "count=2", "iflag=direct"],
            capture_output=True,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            timeout=60,
        )
        assert read.stdout == PATTERN.content(0, 8192), read.stderr
        # Root sees it as well.
        (record,) = device_records()
        assert (record.state, record.server_pid) == ("live", process.pid)
        process.terminate()
        _, words = process.communicate(timeout=60)
        assert process.returncode == 0, words
        assert "stays in its mount namespace" in words
        assert "memory is not locked" in words
    assert list_ublk_devices() == []


def test_a_device_that_nobody_gives_away(server: Path) -> None:
    """The kernel lets its owner not even delete it; root may."""
    with unprivileged(server) as process:
        _, words = process.communicate(timeout=60)
        assert process.returncode == 1 and "a rule of udev has to give" in words
    (device,) = list_ublk_devices()
    done = run_server("--delete-device", str(device.device_id), "--tag", "abc")
    assert done.returncode == 0, done.stderr
    assert list_ublk_devices() == []


def test_root_has_no_use_for_it() -> None:
    with pytest.raises(UsageError, match="other than root"):
        BlockServer(PATTERN, unprivileged=True).__enter__()
    with pytest.raises(UsageError, match="loop device"):
        choose_front_end("fuse", unprivileged=True)


def test_no_recovery() -> None:
    done = run_server("--unprivileged", "--recovery", "reissue", "-")
    assert done.returncode == 2 and "have no recovery" in done.stderr
