"""A device's files, locks and log: without a kernel, a server or privileges."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from btrfs_ublk.base.process import ProcessIdentity, RunningServer
from btrfs_ublk.base.signals import Interrupted, interruptible
from btrfs_ublk.device import lifecycle
from btrfs_ublk.device.locks import Lock, holder_of, is_locked, lock_file
from btrfs_ublk.device.logbook import Logbook
from btrfs_ublk.device.state import (
    RUN_VARIABLE,
    DeviceDirectory,
    DeviceSpec,
    DeviceState,
    StateError,
    check_name,
    device_directories,
    device_directory,
    devices_directory,
)
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, UsageError
from btrfs_ublk.server.description import (
    Description,
    FileSegment,
    LazySegment,
    ZeroSegment,
)
from btrfs_ublk.supervision import client

SPEC = DeviceSpec(name="one", tag="0123456789abcdef", front_end="fuse", size_bytes=4096)


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path / "run"))
    return devices_directory(make=True)


@pytest.fixture
def one(devices: Path) -> DeviceDirectory:
    path = devices / "one"
    path.mkdir(mode=0o700)
    return DeviceDirectory(path)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "-a", "_a", "a/b", "a b", "a\n", "x" * 65, "ä", "a\0"]
)
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a device"):
        check_name(name)


def test_what_is_written_is_read_back(one: DeviceDirectory) -> None:
    assert one.state() == DeviceState()
    one.write_spec(SPEC)
    state = DeviceState(
        status="serving",
        device="/dev/loop7",
        server=ProcessIdentity(1, 2),
        recoveries=3,
        since_s=1.5,
        ready={"queues": 2},
    )
    one.write_state(state)
    assert one.spec() == SPEC and one.state() == state
    assert sorted(os.listdir(one.path)) == ["device.json", "state.json"]


@pytest.mark.parametrize("name", ["device.json", "state.json"])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "cannot be used"),
        ("{", "cannot be used"),
        ("[]", "not a JSON object"),
        ("{}", "has version None of its format, not 1"),
        ('{"version": 99}', "has version 99 of its format"),
        ('{"version": "1"}', "has version '1' of its format"),
        ('{"version": 1, "colour": 7}', "colour"),
        ("\xff\xfe", "cannot be used"),
    ],
)
def test_damage_is_named_and_left(
    one: DeviceDirectory, name: str, content: str, why: str
) -> None:
    file = one.path / name
    file.write_text(content, encoding="latin-1")
    with pytest.raises(StateError, match=why) as caught:
        one.spec() if name == "device.json" else one.state()
    assert str(file) in str(caught.value) and caught.value.hint
    assert file.read_text(encoding="latin-1") == content


@pytest.mark.parametrize(
    ("mode", "match"), [(0o777, "writable for others"), (0o770, "writable for others")]
)
def test_directories_that_others_can_write_to(
    one: DeviceDirectory, mode: int, match: str
) -> None:
    one.path.chmod(mode)
    with pytest.raises(BtrfsUblkError, match=match):
        one.check()
    one.path.chmod(0o700)
    one.check()
    one.path.parent.chmod(mode)
    with pytest.raises(BtrfsUblkError, match=match):
        device_directory("one")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_directories_of_another_user(one: DeviceDirectory) -> None:
    os.chown(one.path, 1, 1)
    with pytest.raises(BtrfsUblkError, match="not a directory owned by"):
        one.check()
    os.chown(one.path.parent.parent, 1, 1)
    with pytest.raises(BtrfsUblkError, match="not a directory owned by"):
        list(device_directories())


def test_a_link_is_no_directory(one: DeviceDirectory) -> None:
    (one.path.parent / "two").symlink_to(one.path)
    with pytest.raises(BtrfsUblkError, match="not a directory"):
        device_directory("two").check()


def test_a_lock_is_held_once(one: DeviceDirectory) -> None:
    with lock_file(one.lock) or pytest.fail("locked") as held:
        assert held.fileno() >= 0 and is_locked(one.lock)
        started_s = time.monotonic()
        assert lock_file(one.lock, timeout_s=0.1) is None
        assert time.monotonic() - started_s >= 0.1
    assert not is_locked(one.lock)
    assert not is_locked(one.server_lock)


def test_a_child_holds_the_lock_on(one: DeviceDirectory) -> None:
    lock = lock_file(one.server_lock)
    assert lock is not None
    child = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fileno()])
    try:
        lock.close()
        assert is_locked(one.server_lock)
        assert holder_of(one.server_lock).pid == child.pid
    finally:
        child.kill()
        child.wait()
    assert not is_locked(one.server_lock)
    with pytest.raises(ProcessLookupError):
        holder_of(one.server_lock)


@pytest.fixture
def supervised(one: DeviceDirectory) -> Iterator[DeviceDirectory]:
    """By a process that is not to be ended: this one."""
    one.write_state(DeviceState(supervisor=ProcessIdentity.of_self()))
    with lock_file(one.lock) or pytest.fail("locked"):
        yield one


def test_a_supervisor_that_hangs_in_the_kernel(
    supervised: DeviceDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(RunningServer):
        def signal(self, signum: signal.Signals) -> None:
            assert signum in (signal.SIGTERM, signal.SIGKILL)

        def wait(self, timeout_s: float) -> bool:
            return False

    monkeypatch.setattr(client, "RunningServer", Hanging)
    with pytest.raises(LeftoverError, match="was killed, but hangs in the kernel"):
        client.detach_supervisor(supervised, timeout_s=60)


def test_a_signal_as_a_device_is_made(
    devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody serves the device yet, so nothing of it is left."""
    make = lifecycle._make

    def make_and_signal(*arguments: Any) -> tuple[DeviceDirectory, Lock]:
        made = make(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return made

    monkeypatch.setattr(lifecycle, "_spec", lambda *_: SPEC)  # It needs no front end.
    monkeypatch.setattr(lifecycle, "_make", make_and_signal)
    with pytest.raises(Interrupted) as raised, interruptible():
        lifecycle.serve_device(
            "one", Description(4096, [ZeroSegment(offset=0, length=4096)])
        )
    assert not hasattr(raised.value, "__notes__")
    assert list(device_directories()) == []


def test_the_log_stays_small(tmp_path: Path) -> None:
    log = Logbook(tmp_path / "log")
    assert log.size() == 0 and log.since(0) == []
    # A server that has it open all the while.
    with open(log.path, "ab", buffering=0) as server:
        server.write(b"btrfs-ublk-server: error: no\n")
        assert log.since(0) == ["btrfs-ublk-server: error: no"]
        for number in range(20000):
            server.write(b"line %9d of a very talkative server\n" % number)
        log.trim()
        assert log.size() < 100_000
        server.write(b"the last\n")
    lines = log.path.read_text().splitlines()
    assert lines[-2:] == ["line     19999 of a very talkative server", "the last"]
    assert lines[0].startswith("line ")


def test_a_description_means_the_same_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor's directory is / ."""
    monkeypatch.chdir(tmp_path)
    lazy = LazySegment(offset=8192, length=4096, map="my.map", cache="my.cache")
    uncached = LazySegment(offset=4096, length=4096, map="/a/map")
    file = FileSegment(offset=0, length=4096, path="seed")
    found = Description(12288, [file, uncached, lazy]).absolute().segments
    here = {"map": f"{tmp_path}/my.map", "cache": f"{tmp_path}/my.cache"}
    path = f"{tmp_path}/seed"
    assert found == (replace(file, path=path), uncached, replace(lazy, **here))
