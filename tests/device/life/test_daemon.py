"""The host's one daemon: it supervises all devices, and may die, or be replaced."""

import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.devices import (
    DESCRIPTION,
    TIMEOUT_S,
    check_content,
    description_file,
    device_command,
    kill,
    kill_keepers,
    reading,
    wait_for,
)
from support.needs import may_be_killed

from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.device import (
    Device,
    DeviceOptions,
    add_device,
    recover_device,
    remove_device,
    show_device,
    upgrade_device,
)
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.kernel.waiting import wait_until
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.supervision.client import (
    DaemonDirectory,
    NoDaemon,
    ask_daemon,
    daemon_command,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("no_devices")]

NAMES = ("one", "two", "three")

#: For what does not depend on it: a test takes a minute of an emulated CPU.
with_fuse = pytest.mark.parametrize(
    "front_end", [pytest.param("fuse", marks=[pytest.mark.fuse])], indirect=True
)


@pytest.fixture
def devices(front_end: FrontEndName) -> list[Device]:
    may_be_killed(front_end)
    options = DeviceOptions(front_end=front_end)
    return [add_device(name, DESCRIPTION, options) for name in NAMES]


def daemon_of(*names: str) -> ProcessIdentity:
    """The one that supervises all of these."""
    (found,) = {show_device(name).state.supervisor for name in names}
    assert found is not None and found.is_alive()
    return found


def wait_for_another(before: ProcessIdentity, *names: str) -> None:
    for name in names:
        wait_for(
            name,
            lambda state: state.status == "serving"
            and state.supervisor not in (None, before),
        )


@with_fuse
def test_it_supervises_all_and_ends_with_the_last(devices: list[Device]) -> None:
    """It has a thread for each device, answers nonsense, and only its user may ask."""
    daemon = daemon_of(*NAMES)
    tasks = Path(f"/proc/{daemon.pid}/task")
    wait_until(
        lambda: len(os.listdir(tasks)) <= 1 + len(NAMES),
        timeout_s=30,
        # One that bounded the time of a start ends a little later.
        what="more threads than devices",
    )
    place = DaemonDirectory.of_host().path
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "socket").stat().st_mode) == 0o600
    for message in (b"\0", b"{", b"[]", b'{"request": "no"}'):
        with DaemonDirectory.of_host().connected() as connection:
            connection.settimeout(30)
            with open(os.devnull) as file:
                socket.send_fds(connection, [message], [file.fileno()])
            assert b'"error"' in connection.recv(4096)
        assert daemon_of(*NAMES) == daemon
    with DaemonDirectory.of_host().connected():  # it says nothing, and stops nobody
        remove_device("three")
    for name in NAMES[:2]:
        assert daemon.is_alive()
        remove_device(name)
    assert not daemon.is_alive()
    with pytest.raises(NoDaemon):
        ask_daemon("release", {"directory": "none"}, timeout_s=5)


@with_fuse
def test_a_command_that_starts_it_leaves_nothing_in_it(
    front_end: FrontEndName, tmp_path: Path
) -> None:
    """It outlives the terminal, and has neither files nor the directory or name of the
    command."""
    may_be_killed(front_end)
    file = description_file(tmp_path)
    words = [sys.executable, "-m", "btrfs_ublk.cli.main", "device", "up", "one", file]
    line = shlex.join([*map(str, words), "--front-end", "fuse"])
    with file.open() as held:
        subprocess.run(
            ["script", "--quiet", "--return", "--command", line, os.devnull],
            check=True,
            cwd=tmp_path,
            pass_fds=[held.fileno()],
            stdout=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
        )
    daemon = daemon_of("one")
    process = Path(f"/proc/{daemon.pid}")
    options = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert options[:4] == [*map(os.fsencode, daemon_command(sys.executable))]
    assert (process / "comm").read_text().strip() == Path(sys.executable).name[:15]
    assert (process / "cwd").readlink() == Path("/")
    files = [str(each.readlink()) for each in (process / "fd").iterdir()]
    assert not [name for name in files if name.startswith(("/dev/pts", str(tmp_path)))]
    # proc_pid_stat(5): field 7, counted from field 3, is the terminal.
    assert (process / "stat").read_text().rpartition(")")[2].split()[4] == "0"
    assert re.search(r"Max core file size +[01] ", (process / "limits").read_text())
    kill(show_device("one").state.server, signal.SIGKILL)
    wait_for("one", lambda state: state.recoveries == 1)
    kill(daemon, signal.SIGKILL)
    wait_for_another(daemon, "one")
    remove_device("one")


def test_it_is_killed_with_all_servers(devices: list[Device]) -> None:
    """One of the keepers starts the next one, which adopts all."""
    before = daemon_of(*NAMES)
    servers = [device.state.server for device in devices]
    paths = [device.path for device in devices]
    assert paths[0] is not None and paths[2] is not None
    with reading(paths[0]) as first, reading(paths[2]) as last:
        kill(before, signal.SIGSTOP)
        for server in servers:
            kill(server, signal.SIGKILL)
        kill(before, signal.SIGKILL)
        wait_for_another(before, *NAMES)
        first.wait_for_reads(20)
        last.wait_for_reads(20)
        assert (first.wrong, first.errors) == (last.wrong, last.errors) == (0, [])
    assert daemon_of(*NAMES) != before
    assert [show_device(name).path for name in NAMES] == paths
    for _ in range(3):  # again and again
        before = daemon_of(*NAMES)
        kill(before, signal.SIGKILL)
        wait_for_another(before, *NAMES)
    # Keepers that waited for their turn have been replaced.
    for name in NAMES:
        (keeper,) = wait_for(name, lambda state: len(state.keepers) == 1).keepers
        assert keeper.process.is_alive()


@with_fuse
@pytest.mark.usefixtures("in_process")
def test_one_that_stops_or_ends_leaves_all_servers(
    devices: list[Device], tmp_path: Path
) -> None:
    """A command wakes it, which would otherwise wait, and be deaf to Ctrl-C, for a
    minute; or adopts what it had."""
    daemon = daemon_of(*NAMES)
    kill(daemon, signal.SIGSTOP)
    began_s = time.monotonic()
    file = description_file(tmp_path)
    done = device_command("up", "four", file, "--front-end", "fuse")
    assert done.returncode == 0, done.stderr
    assert f"daemon {daemon.pid} was stopped: it goes on" in done.stderr
    assert time.monotonic() - began_s < 30
    assert daemon_of(*NAMES, "four") == daemon
    remove_device("four")
    kill(daemon, signal.SIGSTOP)
    for name in NAMES:
        kill_keepers(name)
    kill(daemon, signal.SIGKILL)
    assert daemon.wait(timeout_s=TIMEOUT_S)
    assert show_device("two").health == "unsupervised"
    for name in NAMES:
        assert recover_device(name)
    daemon = daemon_of(*NAMES)
    kill(daemon, signal.SIGTERM)
    assert daemon.wait(timeout_s=TIMEOUT_S)
    for device in devices:
        shown = show_device(device.name)
        assert shown.health == "unsupervised"
        assert shown.state.server == device.state.server
    for device in devices:
        recover_device(device.name)
        assert device.path is not None
        check_content(device.path)


def test_another_program_in_its_place(devices: list[Device]) -> None:
    """The same process goes on; only the device that was named has another server."""
    daemon = daemon_of(*NAMES)
    assert devices[0].path is not None
    with reading(devices[0].path) as readers:
        after = upgrade_device("two")
        assert after.state.upgrades == 1
        wait_for("one", lambda state: state.status == "serving")
        wait_for("three", lambda state: state.status == "serving")
        readers.wait_for_reads(20)
        assert (readers.wrong, readers.errors) == (0, [])
    assert daemon_of(*NAMES) == daemon
    assert show_device("one").state.server == devices[0].state.server
    log = DaemonDirectory.of_host().log.read_text()
    assert f"replaced by {sys.executable}" in log


@with_fuse
def test_a_program_that_does_not_start_never_takes_its_place(
    devices: list[Device], tmp_path: Path
) -> None:
    daemon = daemon_of(*NAMES)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    keys = {"directory": str(device_directory("one").path), "python": str(broken)}
    ask_daemon("replace", keys, timeout_s=30)
    log = DaemonDirectory.of_host().log
    wait_until(
        lambda: "cannot be replaced by another program" in log.read_text(),
        timeout_s=60,
        what="its log says nothing",
    )
    for name in NAMES:
        wait_for(name, lambda state: state.status == "serving")
    assert daemon_of(*NAMES) == daemon


@with_fuse
def test_servers_see_the_environment_of_their_command(
    front_end: FrontEndName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials, say; also when the daemon was another command's, and has died."""
    may_be_killed(front_end)
    file = description_file(tmp_path)
    for name in ("one", "two"):
        monkeypatch.setenv("BTRFS_UBLK_TEST_NAME", f"this is {name}")
        done = device_command("up", name, file, "--front-end", front_end)
        assert done.returncode == 0, done.stderr
    monkeypatch.delenv("BTRFS_UBLK_TEST_NAME")
    for _ in range(2):
        for name in ("one", "two"):
            wait_for(name, lambda state: state.status == "serving")
            server = show_device(name).state.server
            assert server is not None
            environment = Path(f"/proc/{server.pid}/environ").read_text()
            assert f"this is {name}" in environment
        before = daemon_of("one", "two")
        kill(before, signal.SIGSTOP)
        for name in ("one", "two"):
            kill(show_device(name).state.server, signal.SIGKILL)
        kill(before, signal.SIGKILL)
        wait_for_another(before, "one", "two")


@with_fuse
@pytest.mark.skipif(not shutil.which("unshare"), reason="there is no unshare(1)")
def test_another_namespace_is_refused(devices: list[Device], tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "btrfs_ublk.cli.main", "device", "up", "four"]
    done = subprocess.run(
        ["unshare", "--net", *argv, description_file(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "other mount or network namespaces" in done.stderr
    assert "BTRFS_UBLK_RUN_DIR" in done.stderr
    assert not device_directory("four").path.exists()
