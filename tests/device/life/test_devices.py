"""Devices that outlive their makers: what their commands do, with each front end."""

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.devices import (
    DESCRIPTION,
    SIZE,
    TIMEOUT_S,
    answer,
    check_content,
    description_file,
    device_command,
    kill,
    kill_server,
    kill_supervisor,
)
from support.needs import Need, may_be_killed
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import UBLK
from btrfs_ublk.base.process import run
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
from btrfs_ublk.device.state import device_directory, devices_directory
from btrfs_ublk.errors import LeftoverError, UsageError
from btrfs_ublk.kernel import blockdev, mounted
from btrfs_ublk.seed import make_seed
from btrfs_ublk.server import Description, FrontEndName, ZeroSegment
from btrfs_ublk.units import MIB

CAP_SYS_RESOURCE = 24

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("no_devices")]


@pytest.fixture
def options(front_end: FrontEndName) -> DeviceOptions:
    return DeviceOptions(front_end=front_end)


@pytest.mark.usefixtures("in_process")
def test_a_life(front_end: FrontEndName, sparse_path: Path) -> None:
    description = description_file(sparse_path)
    added = device_command("up", "one", description, "--front-end", front_end)
    assert (added.returncode, added.stderr) == (0, "")
    path = Path(added.stdout.strip())
    assert re.fullmatch(r"/dev/(ublkb|loop)[0-9]+", str(path))
    check_content(path)
    assert blockdev.size_bytes(path) == SIZE and blockdev.is_read_only(path)
    (listed,) = answer("list")
    assert (listed["name"], listed["health"]) == ("one", "serving")
    shown = answer("show", "one")
    assert shown["device"] == str(path) and shown["front_end"] == front_end
    assert shown["stats"] and shown["users"] == []
    text = device_command("status", "one").stdout
    assert "serving" in text and str(path) in text
    assert "one" in device_command("list").stdout
    assert (
        device_command("recover", "one").stdout
        == "device one is healthy: nothing was done\n"
    )
    gone = device_command("down", "one")
    assert (gone.returncode, gone.stdout, gone.stderr) == (0, "", "")
    assert device_command("status", "one").returncode == 2
    assert device_command("down", "one").returncode == 2
    assert answer("list") == [] and answer("gc") == []


def test_the_oom_killer_takes_others_first(options: DeviceOptions) -> None:
    """Also than a server that came later."""
    own = int(Path("/proc/self/oom_score_adj").read_text())
    (line,) = re.findall(r"CapEff:\t(\w+)", Path("/proc/self/status").read_text())
    expected = min(own, -900) if int(line, 16) >> CAP_SYS_RESOURCE & 1 else own
    may_be_killed(options.front_end)
    with supervised_device(DESCRIPTION, options, name="one"):
        for look in (lambda: show_device("one").state, lambda: kill_server("one")):
            state = look()
            for process in (state.supervisor, state.server):
                assert process is not None
                score = Path(f"/proc/{process.pid}/oom_score_adj").read_text()
                assert int(score) == expected


@pytest.mark.ublk
def test_a_ublk_id_that_is_taken(need: Need) -> None:
    need(UBLK)
    wanted = DeviceOptions(front_end="ublk", device_id=7)
    with supervised_device(DESCRIPTION, wanted) as device:
        assert device.path == Path("/dev/ublkb7")
        with pytest.raises(UsageError, match="there is a ublk device 7 already"):
            add_device("two", DESCRIPTION, wanted)


def test_del_of_a_mounted_device(options: DeviceOptions, sparse_path: Path) -> None:
    target = sparse_path / "mnt"
    target.mkdir()
    seed = make_seed(sparse_path / "seed.img", virtual_data_size=1 << 30)
    with supervised_device(seed.description([]), options, name="one") as device:
        assert device.path is not None
        supervisor = device.state.supervisor
        with mounted(device.path, target, read_only=True):
            assert show_device("one").users == [f"mounted at {target} (btrfs)"]
            done = device_command("down", "one")
            assert done.returncode == 1
            assert f"mounted at {target}" in done.stderr and "unmount" in done.stderr
            now = show_device("one")
            assert now.is_well and now.state.supervisor == supervisor
            kill_server("one")
            kill_supervisor("one")
            kill(show_device("one").state.server, signal.SIGKILL)
            is_ublk = options.front_end == "ublk"
            health = "dead" if is_ublk else "lost"
            wait_until(
                lambda: show_device("one").health == health,
                lambda: show_device("one").health,
            )
            (left,) = collect_devices()
            cure = "recover one" if is_ublk else "unmount it"
            assert left.result == "left" and cure in str(left.reason)
            with pytest.raises(LeftoverError, match=f"mounted at {target}"):
                remove_device("one")
            if is_ublk:
                assert recover_device("one")
                os.listdir(target)


@pytest.mark.usefixtures("in_process")
def test_the_dead_are_collected(options: DeviceOptions) -> None:
    add_device("one", DESCRIPTION, options)
    assert collect_devices() == []
    kill_supervisor("one")
    assert show_device("one").health == "unsupervised"
    (left,) = collect_devices()
    assert left.result == "left" and "runs without a supervisor" in str(left.reason)
    server = show_device("one").state.server
    kill(server, signal.SIGKILL)
    assert server and server.wait(timeout_s=TIMEOUT_S)
    assert show_device("one").health == "dead"
    (wanted,) = collect_devices(dry_run=True)
    assert (wanted.name, wanted.result) == ("one", "would-remove")
    done = device_command("gc")
    assert (done.returncode, done.stdout) == (0, "removed      one\n")
    assert device_command("gc").stdout == "nothing to remove\n"


def test_old_tokens_are_collected() -> None:
    tokens = devices_directory(make=True).parent / "tokens"
    tokens.mkdir(mode=0o700, exist_ok=True)
    old, used, new = (tokens / name for name in ("old", "used", "new"))
    for path in (old, used, new):
        path.touch()
    for path in (old, used):
        os.utime(path, (0, time.time() - 86401))
    with used.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert collect_devices(dry_run=True) == [] and old.exists()
        assert collect_devices() == []
        assert not old.exists() and used.exists() and new.exists()
    shutil.rmtree(tokens)


def test_a_directory_that_was_removed_under_its_server(options: DeviceOptions) -> None:
    device = add_device("one", DESCRIPTION, options)
    server = device.state.server
    assert server is not None and collect_devices() == []
    shutil.rmtree(device_directory("one").path)
    (left,) = collect_devices()
    assert (left.name, left.result) == ("one", "left")
    assert f"kill {server.pid};" in str(left.reason)
    kill(server, signal.SIGTERM)
    if options.front_end == "fuse":
        run(["losetup", "--detach", str(device.path)], timeout_s=60)
    assert server.wait(timeout_s=TIMEOUT_S) and collect_devices() == []


@pytest.mark.usefixtures("in_process")
def test_a_stopped_server(options: DeviceOptions) -> None:
    """Nobody waits for it without end, and it can be removed."""
    device = add_device("one", DESCRIPTION, options)
    kill(device.state.server, signal.SIGSTOP)
    started_s = time.monotonic()
    assert show_device("one").health == "hanging"
    assert list_devices()[0].health == "serving"  # it is not asked
    text = device_command("status", "one")
    assert text.returncode == 1 and "does not answer" in text.stdout
    remove_device("one", timeout_s=5)
    assert time.monotonic() - started_s < 60


def test_a_hanging_server_is_replaced(front_end: FrontEndName) -> None:
    wanted = DeviceOptions(front_end=front_end, hang_timeout_s=2)
    with supervised_device(DESCRIPTION, wanted, name="one") as device:
        state = kill_server("one", signal.SIGSTOP)
        assert state.recoveries == 1 and "did not answer" in str(state.last_end)
        assert device.path is not None
        check_content(device.path)


def test_in_the_foreground(front_end: FrontEndName, sparse_path: Path) -> None:
    """As systemd has it: READY=1, TERM leaves the server serving, and it goes on."""
    address = sparse_path / "notify"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(address))
    listener.settimeout(60)
    argv = [
        *(sys.executable, "-m", "btrfs_ublk.cli.main", "device", "serve", "one"),
        *(description_file(sparse_path), "--front-end", front_end),
    ]
    servers = []
    for _ in range(2):
        process = subprocess.Popen(
            argv, env=os.environ | {"NOTIFY_SOCKET": str(address)}
        )
        try:
            while b"READY=1" not in listener.recv(4096):
                pass
            servers.append(show_device("one").state.server)
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
        assert show_device("one").health == "unsupervised"
    listener.close()
    assert servers[0] == servers[1]
    other = Description(MIB, [ZeroSegment(offset=0, length=MIB)])
    argv[-3] = description_file(sparse_path, other)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "serves another description" in done.stderr
