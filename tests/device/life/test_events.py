"""``btrfs-ublk events``: what becomes of devices is told as it happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices import DESCRIPTION, kill_server

from btrfs_ublk.device import DeviceOptions, add_device, remove_device
from btrfs_ublk.device.state import DeviceDirectory, DeviceSpec, devices_directory
from btrfs_ublk.ops.events import Event, follow_events
from btrfs_ublk.units import MIB


def make(name: str, tag: str = "0" * 16) -> DeviceDirectory:
    """As a command makes it: its directory appears as a whole."""
    half = DeviceDirectory(devices_directory(make=True) / f".{name}")
    half.path.mkdir(mode=0o700)
    half.write_spec(
        DeviceSpec(name=name, tag=tag, front_end="fuse", size_bytes=64 * MIB)
    )
    half.path.rename(half.path.with_name(name))
    return DeviceDirectory(half.path.with_name(name))


def remove(directory: DeviceDirectory) -> None:
    gone = directory.path.with_name(f".{directory.name}")
    directory.path.rename(gone)
    for path in gone.iterdir():
        path.unlink()
    gone.rmdir()


def told(event: Event) -> tuple[str, str, str | None]:
    return event.device, event.event, event.health


@pytest.fixture
def events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Iterator[Event]]:
    """Of a run directory of its own, with the device "old" in it."""
    monkeypatch.setenv("BTRFS_UBLK_RUN_DIR", str(tmp_path / "run"))
    make("old")
    followed = follow_events()
    assert told(next(followed)) == ("old", "present", "dead")
    yield followed
    followed.close()  # it has a watch of the directory


def test_devices_come_and_go(events: Iterator[Event]) -> None:
    new = make("new")
    assert told(next(events)) == ("new", "added", "dead")
    remove(new)
    assert told(next(events)) == ("new", "removed", None)
    make("new")
    assert told(next(events)) == ("new", "added", "dead")


@pytest.mark.fuse
@pytest.mark.usefixtures("no_devices")
def test_a_server_is_killed() -> None:
    add_device("v", DESCRIPTION, DeviceOptions(front_end="fuse"))
    argv = [sys.executable, "-m", "btrfs_ublk.cli.main", "events", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=os.environ) as command:
        assert command.stdout is not None
        try:
            first = json.loads(command.stdout.readline())
            assert (first["event"], first["health"]) == ("present", "serving")
            kill_server("v")
            later = [json.loads(command.stdout.readline())]
            while later[-1]["event"] != "recovered":
                later.append(json.loads(command.stdout.readline()))
            assert {event["device"] for event in later} == {"v"}
            remove_device("v")
            while later[-1]["event"] != "removed":
                later.append(json.loads(command.stdout.readline()))
        finally:
            command.terminate()
    assert command.returncode == 143
