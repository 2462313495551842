"""A device's keeper: any two of server, supervisor and keeper are killed at once, and
nobody has to type a command; what ends on purpose stays ended.
"""

import json
import signal
import subprocess
import sys
import time

import pytest
from support.devices import (
    DESCRIPTION,
    TIMEOUT_S,
    check_content,
    is_whole,
    kill,
    kill_those,
    reading,
    remove_all,
    wait_for,
)
from support.needs import may_be_killed

from btrfs_ublk.device import (
    Device,
    DeviceOptions,
    add_device,
    collect_devices,
    recover_device,
    show_device,
)
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.server import FrontEndName

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("no_devices")]

WHO = ("server", "supervisor", "keeper")


@pytest.fixture
def device(front_end: FrontEndName) -> Device:
    may_be_killed(front_end)
    return add_device("one", DESCRIPTION, DeviceOptions(front_end=front_end))


@pytest.mark.data
def test_they_come_back_by_themselves(device: Device) -> None:
    """Under verified reads, of which none fails. Without supervisor and keeper, the
    server serves on, and has what the next ones need."""
    assert device.path is not None
    with reading(device.path) as readers:
        for who in (
            *((one,) for one in WHO),
            *(("server", "supervisor"), ("server", "keeper")),
        ):
            kill_those(who)
            wait_for("one", is_whole)
            readers.wait_for_reads(20)
        kill_those(("supervisor", "keeper"))
        readers.wait_for_reads(20)
        assert show_device("one").health == "unsupervised"
        assert recover_device("one")
        for who in ("server", "supervisor"), ("keeper",), ("server", "keeper"):
            kill_those(who)
            wait_for("one", is_whole)
        readers.wait_for_reads(20)
        assert (readers.wrong, readers.errors) == (0, [])
    assert show_device("one").path == device.path


def test_what_ends_on_purpose_stays_ended(device: Device) -> None:
    supervisor, server = device.state.supervisor, device.state.server
    kill(supervisor, signal.SIGTERM)
    assert supervisor and supervisor.wait(timeout_s=TIMEOUT_S)
    time.sleep(2)
    shown = show_device("one")
    assert shown.health == "unsupervised" and shown.state.supervisor is None
    assert shown.state.server == server
    kill(server, signal.SIGKILL)
    assert server and server.wait(timeout_s=TIMEOUT_S)
    time.sleep(1)
    assert show_device("one").health == "dead"
    assert recover_device("one")
    assert device.path is not None
    check_content(device.path)
    assert is_whole(device_directory("one").state())


def test_removed_and_collected_while_it_is_revived(device: Device) -> None:
    kill_those(("server", "supervisor"))
    assert collect_devices() == []
    wait_for("one", is_whole)
    for _ in range(3):
        kill_those(("server", "supervisor"))
        found = device_directory("one").state()
        remove_all()
        assert not device_directory("one").path.exists()
        assert not any(keeper.process.is_alive() for keeper in found.keepers)
        add_device("one", DESCRIPTION, DeviceOptions(front_end=front_end_of(device)))


def front_end_of(device: Device) -> FrontEndName:
    assert device.spec is not None
    return device.spec.front_end


def test_a_supervisor_in_the_foreground_is_not_revived(device: Device) -> None:
    """systemd does that; with fuse, a keeper holds the connection meanwhile."""
    argv = [sys.executable, "-m", "btrfs_ublk.cli.main", "device", "serve", "one"]
    foreground = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        state = wait_for(
            "one",
            lambda state: state.status == "serving"
            and state.supervisor is not None
            and state.supervisor.pid == foreground.pid,
        )
        assert [keeper.revives for keeper in state.keepers] in ([], [False])
        assert bool(state.keepers) == (front_end_of(device) == "fuse")
        foreground.kill()
        foreground.wait(TIMEOUT_S)
        time.sleep(1)
        assert show_device("one").health == "unsupervised"
    finally:
        foreground.kill()
        foreground.wait(TIMEOUT_S)


@pytest.mark.fuse
@pytest.mark.parametrize("front_end", ["fuse"], indirect=True)
def test_the_former_recovery_means_auto(device: Device) -> None:
    """swap, which lost data, in what an earlier version wrote."""
    file = device_directory("one").path / "device.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"recovery": "swap"}))
    kill_those(("server", "supervisor"))
    wait_for("one", is_whole)
    assert device_directory("one").spec().recovery == "auto"
