"""``btrfs-ublk device``: what stands above all front ends, tried with one of them."""

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.devices import (
    DESCRIPTION,
    description_file,
    device_command,
    kill_supervisor,
    wait_for,
)
from support.needs import Need

from btrfs_ublk.base.capabilities import FUSE, LOOP
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.device import (
    DeviceOptions,
    add_device,
    collect_devices,
    list_devices,
    recover_device,
    remove_device,
    show_device,
    supervised_device,
)
from btrfs_ublk.device.locks import lock_file
from btrfs_ublk.device.state import DeviceDirectory, device_directory, devices_directory
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.server import FrontEndName

pytestmark = [pytest.mark.fuse, pytest.mark.usefixtures("no_devices")]


@pytest.fixture
def front_end(need: Need) -> FrontEndName:
    """That which most machines have."""
    need(FUSE, LOOP)
    return "fuse"


@pytest.fixture
def options(front_end: FrontEndName) -> DeviceOptions:
    return DeviceOptions(front_end=front_end)


def test_a_run_directory_without_room(options: DeviceOptions) -> None:
    before = os.listdir("/proc/self/fd")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(BtrfsUblkError, match="cannot write .*device.json"):
            add_device("one", DESCRIPTION, options)
        # NB: looked at while the error, and all that it refers to, is still there.
        assert len(os.listdir("/proc/self/fd")) == len(before)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(devices_directory()) == [".lock"]


def test_two_that_want_one_name_at_once(
    front_end: FrontEndName, sparse_path: Path
) -> None:
    description = description_file(sparse_path)
    with ThreadPoolExecutor(2) as pool:
        both = list(
            pool.map(
                lambda _: device_command(
                    "up", "one", description, "--front-end", front_end
                ),
                range(2),
            )
        )
    assert sorted(done.returncode for done in both) == [0, 2]
    (loser,) = [done for done in both if done.returncode]
    assert "a device 'one' exists already" in loser.stderr
    assert show_device("one").is_well


def test_the_exit_status_says_whether_it_may_be_tried_again(
    front_end: FrontEndName, sparse_path: Path
) -> None:
    """systemd does so unless it is what the unit excepts."""
    program = sparse_path / "server"
    for command, status in (("add", 2), ("serve", 3)):
        program.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && exec {helper_path(SERVER)} "$@"\n'
            f"echo no luck >&2\nexit {status}\n"
        )
        program.chmod(0o755)
        done = device_command(
            *(command, "one", description_file(sparse_path)),
            *("--front-end", front_end, "--server", program),
        )
        assert done.returncode == status and "no luck" in done.stderr, done.stderr
        assert list_devices() == []


def test_a_server_that_takes_too_long(
    options: DeviceOptions, sparse_path: Path
) -> None:
    """Its words are told: nobody can read them later, when all is removed."""
    program = sparse_path / "server"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {helper_path(SERVER)} "$@"\n'
        "echo I am thinking >&2\nexec sleep 60\n"
    )
    program.chmod(0o755)
    slow = replace(options, server=program)
    with pytest.raises(BtrfsUblkError, match="does not serve after 1 s") as caught:
        add_device("one", DESCRIPTION, slow, timeout_s=1)
    said = str(caught.value)
    assert "I am thinking" in said and "is removed again" in said
    assert "goes on trying" not in said and str(devices_directory()) not in said
    assert os.listdir(devices_directory()) == [".lock"]


def test_half_made_directories(options: DeviceOptions) -> None:
    devices = devices_directory()
    others = [devices / name for name in (".other", ".x.abc", ".x.0123456789abcdeg")]
    halves = [devices / f".{name}.0123456789abcdef" for name in ("one", "two.three")]
    for path in (*others, *halves):
        path.mkdir(mode=0o700)
        (path / "device.json").write_text("{}")
    assert list_devices() == []
    assert [found.result for found in collect_devices(dry_run=True)] == [
        "would-remove"
    ] * 2
    with supervised_device(DESCRIPTION, options, name="one"):
        assert [found.name for found in collect_devices()] == ["one", "two.three"]
        assert show_device("one").is_well
    # Whatever somebody has put there himself stays.
    for path in others:
        (path / "device.json").unlink()
        path.rmdir()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", ["state.json", "device.json"])
def test_damaged_files(options: DeviceOptions, name: str) -> None:
    device = add_device("one", DESCRIPTION, options)
    kill_supervisor("one")
    file = device_directory("one").path / name
    whole = file.read_text()
    file.write_text("{ damage")
    assert [found.health for found in list_devices()] == ["damaged"]
    for command in ("show", "recover", "del", "gc"):
        done = device_command(command, *(["one"] if command != "gc" else []))
        assert done.returncode == 1, (command, done.stdout, done.stderr)
        assert str(file) in done.stdout + done.stderr
    assert file.read_text() == "{ damage"
    if name == "state.json":
        file.unlink()
    else:
        file.write_text(whole)
    assert recover_device("one")
    after = show_device("one")
    assert after.is_well and after.path == device.path
    assert after.state.server == device.state.server
    remove_device("one")


def test_a_removal_that_fails_leaves_it_supervised(
    options: DeviceOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no room")

    before = add_device("one", DESCRIPTION, options).state
    with monkeypatch.context() as patch:
        patch.setattr(DeviceDirectory, "write_state", fail)
        with pytest.raises(OSError, match="no room"):
            remove_device("one")
    gone = (None, before.supervisor)
    after = wait_for(
        "one",
        lambda state: state.status == "serving" and state.supervisor not in gone,
        timeout_s=30,
    )
    assert after.server == before.server and show_device("one").is_well
    remove_device("one")


def test_a_command_at_work_is_not_disturbed(options: DeviceOptions) -> None:
    add_device("one", DESCRIPTION, options)
    kill_supervisor("one")
    lock = lock_file(device_directory("one").lock, timeout_s=5)
    assert lock is not None
    with lock:
        with pytest.raises(BtrfsUblkError, match="another command works on device"):
            remove_device("one", timeout_s=0.5)
        assert collect_devices() == []
    remove_device("one")
