"""A device's keeper: any two of server, supervisor and keeper are killed at once, and
nobody has to type a command; what ends on purpose stays ended.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.device_support import (
    DESCRIPTION,
    TIMEOUT_S,
    check_content,
    device_command,
    is_whole,
    kill,
    kill_if_alive,
    kill_those,
    processes,
    reading,
    remove_all,
    wait_for,
)
from support.needs import may_be_killed
from support.refused_calls import refusing
from support.soak import rounds

from btrfs_ublk.base.helpers import KEEPER, helper_path
from btrfs_ublk.device import (
    Device,
    DeviceOptions,
    add_device,
    collect_devices,
    recover_device,
    remove_device,
    show_device,
)
from btrfs_ublk.device.keeping import Keeping
from btrfs_ublk.device.state import DeviceDirectory, KeeperRecord, device_directory
from btrfs_ublk.kernel.uevents import wait_until
from btrfs_ublk.server import FrontEndName

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("no_devices")]

WHO = ("server", "supervisor", "keeper")


@pytest.fixture
def device(front_end: FrontEndName) -> Device:
    may_be_killed(front_end)
    return add_device("one", DESCRIPTION, DeviceOptions(front_end=front_end))


@pytest.mark.data
@pytest.mark.parametrize(
    "who",
    [(one,) for one in WHO] + [("server", "supervisor"), ("server", "keeper")],
    ids="+".join,
)
def test_they_come_back_by_themselves(device: Device, who: tuple[str, ...]) -> None:
    """Twice in a row, under verified reads, of which none fails."""
    assert device.path is not None
    with reading(device.path) as readers:
        for _ in range(2):
            kill_those(who)
            wait_for("one", is_whole)
            readers.wait_for_reads(20)
        assert (readers.wrong, readers.errors) == (0, [])
    assert show_device("one").path == device.path


@pytest.mark.data
@pytest.mark.gate_ublk
def test_supervisor_and_keeper_are_killed(device: Device) -> None:
    """The server serves on, and has what the next ones need."""
    assert device.path is not None
    with reading(device.path) as readers:
        kill_those(("supervisor", "keeper"))
        readers.wait_for_reads(20)
        assert show_device("one").health == "unsupervised"
        assert recover_device("one")
        for who in ("server", "supervisor"), ("keeper",), ("server", "keeper"):
            kill_those(who)
            wait_for("one", is_whole)
        readers.wait_for_reads(20)
        assert (readers.wrong, readers.errors) == (0, [])


@pytest.mark.data
@pytest.mark.parametrize("seed", rounds(4))
def test_killed_again_while_it_recovers(device: Device, seed: int) -> None:
    """Two die, and what comes next is killed at a random moment of its takeover."""
    chances = random.Random(seed)
    assert device.path is not None
    with reading(device.path) as readers:
        for _ in range(4):
            who = chances.choice([("server", "supervisor"), ("server", "keeper")])
            before = processes(wait_for("one", is_whole))
            kill_those(who)
            time.sleep(chances.uniform(0, 0.6))
            state = device_directory("one").state()
            # Never what is the last one to hold the connection.
            second = chances.choice(["server", "supervisor"])
            next_one = state.server if second == "server" else state.supervisor
            if next_one != before[second]:
                kill_if_alive(next_one)
            wait_for("one", is_whole)
            readers.wait_for_reads(10)
        assert (readers.wrong, readers.errors) == (0, [])


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


def test_reads_wait_after_a_stop_on_purpose(device: Device) -> None:
    """The keeper holds on: the next supervisor finds all."""
    assert device.path is not None
    with reading(device.path) as readers:
        supervisor, server = device.state.supervisor, device.state.server
        kill(supervisor, signal.SIGTERM)
        assert supervisor and supervisor.wait(timeout_s=TIMEOUT_S)
        kill(server, signal.SIGKILL)
        assert recover_device("one")
        readers.wait_for_reads(20)
        assert (readers.wrong, readers.errors) == (0, [])


def test_one_that_dies_young_is_replaced_at_once(tmp_path: Path) -> None:
    """Else nothing holds the connection meanwhile, if the others are killed, too."""
    directory = DeviceDirectory(tmp_path)
    written: list[list[KeeperRecord]] = []
    keeping = Keeping(directory, [], [], written.append, None, None)
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        for _ in range(3):
            keeping.keep([fd])
            assert keeping.keeper is not None
            assert written[-1] == [keeping.keeper.record]
            kill(keeping.keeper.record.process, signal.SIGKILL)
            keeping.keeper.record.process.wait(timeout_s=TIMEOUT_S)
    finally:
        keeping.drop()
        os.close(fd)


def test_one_that_cannot_be_started_delays_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for other descriptors: the one before goes on, and the next succeeds."""
    keeping = Keeping(DeviceDirectory(tmp_path), [], [], lambda _: None, None, None)
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
    try:
        keeping.keep(fds[:1])
        with monkeypatch.context() as patch:
            patch.setattr("btrfs_ublk.device.keeper.helper_path", lambda _: "/none")
            keeping.keep(fds)
        keeping.keep(fds)
        assert keeping.keeper is not None and keeping.keeper.record.fds == fds
        kill(keeping.keeper.record.process, signal.SIGKILL)
        keeping.keeper.record.process.wait(timeout_s=TIMEOUT_S)

        def is_kept() -> bool:
            keeping.keep(fds)
            return keeping.keeper is not None and not keeping.keeper.has_ended()

        wait_until(is_kept, timeout_s=TIMEOUT_S, what="no keeper")
    finally:
        keeping.drop()
        for fd in fds:
            os.close(fd)


def test_none_is_left(device: Device) -> None:
    keeper = processes(device.state)["keeper"]
    remove_device("one")
    assert not keeper.is_alive()


def test_removed_while_it_is_revived(device: Device) -> None:
    for _ in range(4):
        kill_those(("server", "supervisor"))
        found = device_directory("one").state()
        remove_all()
        assert not device_directory("one").path.exists()
        assert not any(keeper.process.is_alive() for keeper in found.keepers)
        add_device("one", DESCRIPTION, DeviceOptions(front_end=front_end_of(device)))


def front_end_of(device: Device) -> FrontEndName:
    assert device.spec is not None
    return device.spec.front_end


def test_gc_leaves_what_is_being_revived(device: Device) -> None:
    kill_those(("server", "supervisor"))
    assert collect_devices() == []
    wait_for("one", is_whole)


def test_show_names_it(device: Device) -> None:
    keeper = processes(device.state)["keeper"]
    shown = device_command("status", "one")
    assert f"keeper                 {keeper.pid}\n" in shown.stdout


def test_what_it_costs(device: Device) -> None:
    keeper = processes(device.state)["keeper"]
    rollup = Path(f"/proc/{keeper.pid}/smaps_rollup").read_text()
    (pss,) = [line for line in rollup.splitlines() if line.startswith("Pss:")]
    print(pss)
    assert int(pss.split()[1]) < 1024  # KiB
    assert os.getsid(keeper.pid) == keeper.pid
    status = Path(f"/proc/{keeper.pid}/status").read_text()
    assert "Threads:\t1\n" in status


def test_none_without_recovery(front_end: FrontEndName) -> None:
    options = DeviceOptions(front_end=front_end, recovery="none")
    assert add_device("one", DESCRIPTION, options).state.keepers == []


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
class TestFormerRecovery:
    """swap, which lost data."""

    def test_it_means_auto(self, device: Device, tmp_path: Path) -> None:
        remove_device("one")
        description = tmp_path / "description.json"
        description.write_text(DESCRIPTION.to_json())
        done = device_command(
            *("add", "one", description, "--front-end", "fuse", "--recovery", "swap")
        )
        assert done.returncode == 0 and "recovery swap was removed" in done.stderr
        assert device_directory("one").spec().recovery == "auto"

    def test_what_an_earlier_version_wrote(self, device: Device) -> None:
        file = device_directory("one").path / "device.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"recovery": "swap"}))
        kill_those(("server", "supervisor"))
        wait_for("one", is_whole)
        assert device_directory("one").spec().recovery == "auto"


class TestHelper:
    """The program alone."""

    @contextmanager
    def keeper(
        self, directory: Path, *command: str
    ) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        read_fd, write_fd = os.pipe()
        argv = [helper_path(KEEPER), "--watch", str(read_fd)]
        child = subprocess.Popen(
            [*argv, "--directory", directory, *command], pass_fds=[read_fd]
        )
        os.close(read_fd)
        with ExitStack() as stack:
            stack.callback(lambda: (child.kill(), child.wait()))
            stack.callback(lambda: os.close(write_fd) if write_fd in open_fds() else 0)
            yield child, write_fd

    def test_it_ends_with_who_started_it_before_it_goes(self, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        with self.keeper(tmp_path, "/usr/bin/touch", str(mark)) as (child, fd):
            os.close(fd)
            assert child.wait(TIMEOUT_S) == 0
        assert not mark.exists()

    def test_it_starts_the_command_until_it_succeeds(self, tmp_path: Path) -> None:
        script = f'echo >> {tmp_path}/runs; [ "$(wc -l < {tmp_path}/runs)" -ge 3 ]'
        with self.keeper(tmp_path, "/bin/sh", "-c", script) as (child, fd):
            os.write(fd, b"g")
            os.close(fd)
            runs = tmp_path / "runs"
            wait_until(
                lambda: runs.exists() and runs.read_text() == "\n" * 3,
                timeout_s=TIMEOUT_S,
                what="three runs",
            )
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(1)
            assert runs.read_text() == "\n" * 3

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="names calls by number")
    def test_a_lock_that_cannot_be_had_is_tried_again_after_a_pause(
        self, tmp_path: Path
    ) -> None:
        """As on a kernel that lacks memory for locks. It must not go round at once."""
        read_fd, write_fd = os.pipe()
        flock = 73
        argv = [*refusing({flock: errno.ENOLCK}), helper_path(KEEPER), "--watch"]
        argv += [str(read_fd), "--directory", tmp_path, "--lock", tmp_path / "lock"]
        with subprocess.Popen(
            [*argv, "/bin/true"], pass_fds=[read_fd], stderr=subprocess.PIPE, text=True
        ) as child:
            os.close(read_fd)
            os.write(write_fd, b"g")
            os.close(write_fd)
            assert child.stderr is not None
            try:
                said = [child.stderr.readline() for _ in range(2)]
            finally:
                child.kill()
        assert all("cannot lock" in line for line in said), said
        assert all(os.strerror(errno.ENOLCK) in line for line in said)

    def test_after_a_farewell_it_only_stays(self, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        with self.keeper(tmp_path, "/usr/bin/touch", str(mark)) as (child, fd):
            os.write(fd, b"gs")
            os.close(fd)
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(1)
        assert not mark.exists()

    def test_it_ends_when_the_device_is_gone(self, tmp_path: Path) -> None:
        directory, mark = tmp_path / "device", tmp_path / "mark"
        directory.mkdir()
        command = f"touch {mark}; exit 1"
        with self.keeper(directory, "/bin/sh", "-c", command) as (child, fd):
            os.write(fd, b"g")
            os.close(fd)
            wait_until(mark.exists, timeout_s=TIMEOUT_S, what="no command")
            directory.rmdir()
            assert child.wait(TIMEOUT_S) == 0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "--watch is missing"),
            (["--watch", "0"], "--directory is missing"),
            (["--watch", "x"], "'x' is no open descriptor"),
            (["--watch", "99"], "'99' is no open descriptor"),
            (["--what"], "`btrfs-ublk-keeper --help` shows the usage"),
        ],
    )
    def test_usage(self, arguments: list[str], message: str) -> None:
        done = subprocess.run(
            [helper_path(KEEPER), *arguments], capture_output=True, text=True
        )
        assert done.returncode == 2 and message in done.stderr


def open_fds() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}
