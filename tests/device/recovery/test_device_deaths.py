"""Devices that outlive their servers and supervisors: kills in any order, upgrades,
with a mounted sprout and reads that are verified all the while.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.devices import (
    DESCRIPTION,
    PATTERN,
    TIMEOUT_S,
    Readers,
    check_content,
    description_file,
    device_command,
    is_lossless,
    kill,
    kill_server,
    kill_supervisor,
    reading,
    wait_for,
)
from support.faults import refusing
from support.needs import Need, inapplicable, may_be_killed

from btrfs_ublk.base.capabilities import FUSE, LOOP
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.device import (
    Device,
    DeviceOptions,
    add_device,
    recover_device,
    remove_device,
    show_device,
    supervised_device,
    upgrade_device,
)
from btrfs_ublk.device.state import RecoveryName, device_directory
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.reflink import clone_file
from btrfs_ublk.seed import make_seed
from btrfs_ublk.server import Description, FileSegment, FrontEndName, PatternSegment
from btrfs_ublk.units import GIB, MIB
from btrfs_ublk.volume.sprout import Sprout, sprout
from btrfs_ublk.volume.temporary import virtual_file_of

pytestmark = [
    pytest.mark.data,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("no_devices"),
]

VIRTUAL_BYTES = 1 << 40


@dataclass(frozen=True)
class Grown:
    """A sprout on the device "one", and a clone that is being read."""

    sprout: Sprout
    clone: Path
    readers: Readers


@pytest.fixture
def grown(front_end: FrontEndName, sparse_path: Path) -> Iterator[Grown]:
    may_be_killed(front_end)
    target = sparse_path / "mnt"
    target.mkdir()
    seed = make_seed(
        sparse_path / "seed.img", virtual_data_size=VIRTUAL_BYTES, metadata_only=True
    )
    contents = PatternSegment(offset=0, length=VIRTUAL_BYTES)
    options = DeviceOptions(front_end=front_end)
    with ExitStack() as stack:
        device = stack.enter_context(
            supervised_device(seed.description([contents]), options, name="one")
        )
        assert device.path is not None
        made = stack.enter_context(sprout(device.path, target, parent=sparse_path))
        clone = made.target / "clone"
        with virtual_file_of(seed, made.target) as virtual:
            clone_file(virtual, clone, source_offset=GIB, size_bytes=64 * MIB)
        held = contents.part(GIB, GIB + 64 * MIB)
        readers = stack.enter_context(reading(clone, held))
        yield Grown(made, clone, readers)
        readers.stop()
        assert readers.wrong == 0
        (made.target / "written").write_bytes(b"still writable")
        os.sync()


def assert_survived(grown: Grown) -> None:
    """Reads go on; none was wrong, and none failed where the front end says so."""
    grown.readers.wait_for_reads(50)
    assert grown.readers.wrong == 0
    if is_lossless(show_device("one")):
        assert grown.readers.errors == []


@pytest.mark.gate_ublk
def test_the_server_ends(grown: Grown) -> None:
    for count in range(1, 4):
        state = kill_server("one")
        assert state.recoveries == count
        assert "SIGKILL" in str(state.last_end)
        assert_survived(grown)
    for signum in (signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM):
        before = show_device("one").state.server
        kill(before, signum)
        if signum == signal.SIGTERM:
            # In use: it serves on, until a second one insists.
            time.sleep(1)
            assert show_device("one").state.server == before
            kill(before, signum)
        wait_for(
            "one", lambda now, old=before: now.status == "serving" and now.server != old
        )
        assert_survived(grown)


def test_the_supervisor_ends(grown: Grown) -> None:
    server = show_device("one").state.server
    kill_supervisor("one")
    assert_survived(grown)
    assert show_device("one").health == "unsupervised"
    done = recover_device("one")
    assert any("was not interrupted" in line for line in done)
    assert show_device("one").state.server == server
    assert recover_device("one") == []
    kill_server("one")
    assert_survived(grown)
    before = show_device("one").state  # stopped, it is woken
    kill(before.supervisor, signal.SIGSTOP)
    kill(before.server, signal.SIGKILL)
    recover_device("one")
    assert show_device("one").state.supervisor == before.supervisor
    assert_survived(grown)
    kill_supervisor("one")
    upgrade_device("one")
    assert show_device("one").state.upgrades == 1
    assert_survived(grown)


def test_upgrade_under_reads(grown: Grown, sparse_path: Path) -> None:
    """One that fails has the program that served before serve on."""
    before = show_device("one").state
    newer = Path(shutil.copy(helper_path(SERVER), sparse_path / "newer-server"))
    done = device_command("upgrade", "one", "--server", newer)
    assert done.returncode == 0, done.stderr
    after = show_device("one").state
    assert after.server is not None and after.server != before.server
    assert os.readlink(f"/proc/{after.server.pid}/exe") == str(newer)
    assert after.supervisor == before.supervisor  # the same process
    assert (after.upgrades, after.recoveries) == (1, 0)
    assert_survived(grown)
    upgrade_device("one")
    state = show_device("one").state
    assert state.server is not None and state.upgrades == 2
    assert before.supervisor is not None
    children = {x.pid for x in psutil.Process(before.supervisor.pid).children()}
    assert children == {state.server.pid, *(x.process.pid for x in state.keepers)}
    assert os.readlink(f"/proc/{state.server.pid}/exe") == str(helper_path(SERVER))
    assert_survived(grown)
    broken = sparse_path / "broken-server"
    broken.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo btrfs-ublk-server 9 && exit\n"
        "echo no luck >&2; exit 1\n"
    )
    broken.chmod(0o755)
    with pytest.raises(BtrfsUblkError, match="no luck"):
        upgrade_device("one", server=broken)
    state = wait_for("one", lambda state: state.status == "serving")
    assert state.server is not None and state.upgrades == 2
    assert os.readlink(f"/proc/{state.server.pid}/exe") == str(helper_path(SERVER))
    # The next one is tried again.
    upgrade_device("one", server=newer)
    state = show_device("one").state
    assert state.server is not None and state.upgrades == 3
    assert os.readlink(f"/proc/{state.server.pid}/exe") == str(newer)
    kill_server("one")
    assert_survived(grown)


#: pidfd_getfd(2) fails, as in a container without CAP_SYS_PTRACE.
UNPRIVILEGED = {438: errno.EPERM}


@pytest.mark.fuse
def test_no_upgrade_that_would_lose_the_device(need: Need, sparse_path: Path) -> None:
    """The server would leave; only its supervisor knows that nobody keeps it."""
    need(FUSE, LOOP)
    main = [sys.executable, "-m", "btrfs_ublk.cli.main"]
    argv = ["device", "add", "one", description_file(sparse_path), "--front-end"]
    subprocess.run(
        [*refusing(UNPRIVILEGED), *main, *argv, "fuse"], check=True, timeout=60
    )
    before = show_device("one")
    if before.state.ready["recovery"] != "reissue":
        inapplicable("this kernel cannot send requests again")
    assert before.path is not None
    with reading(before.path) as readers:
        with pytest.raises(BtrfsUblkError, match="does not keep its FUSE connection"):
            upgrade_device("one")
        readers.wait_for_reads(50)
        assert (readers.wrong, readers.errors) == (0, [])
    after = show_device("one")
    assert after.is_well and after.state.server == before.state.server
    # Nobody uses it any more: when its server dies, a new one takes its place.
    check_content(Path(str(kill_server("one").device)))


RECOVERIES = [
    pytest.param("ublk", "reissue", marks=pytest.mark.ublk),
    pytest.param("ublk", "queue", marks=pytest.mark.ublk),
    pytest.param("ublk", "fail-io", marks=pytest.mark.ublk),
]


def added(
    front_end: FrontEndName,
    recovery: RecoveryName,
    description: Description = DESCRIPTION,
) -> Device:
    """Skips where the kernel has no such recovery."""
    options = DeviceOptions(front_end=front_end, recovery=recovery)
    try:
        return add_device("one", description, options)
    except BtrfsUblkError as error:
        if "recovery" not in str(error).lower() and "resend" not in str(error).lower():
            raise
        inapplicable(str(error))


@pytest.mark.parametrize(("front_end", "recovery"), RECOVERIES, indirect=["front_end"])
def test_each_recovery(front_end: FrontEndName, recovery: RecoveryName) -> None:
    may_be_killed(front_end)
    device = added(front_end, recovery)
    assert device.path is not None
    try:
        with reading(device.path) as readers:
            for _ in range(3):
                kill_server("one")
                readers.wait_for_reads(50)
            assert readers.wrong == 0
            assert readers.errors == [] or recovery != "reissue"
        check_content(device.path, PATTERN)
    finally:
        remove_device("one")


def test_no_recovery(front_end: FrontEndName) -> None:
    device = added(front_end, "none")
    assert device.path is not None
    kill(device.state.server, signal.SIGKILL)
    state = wait_for("one", lambda state: state.status == "lost")
    assert "no recovery" in str(state.reason)
    supervisor = device.state.supervisor
    assert supervisor is not None and supervisor.wait(timeout_s=TIMEOUT_S)
    started_s = time.monotonic()
    with pytest.raises(OSError):
        read_direct(device.path, 0, 4096)
    assert time.monotonic() - started_s < 60
    assert show_device("one").health == "lost"
    # Nobody has it mounted: a new one may take its place.
    assert recover_device("one")
    path = show_device("one").path
    assert path is not None
    check_content(path)
    remove_device("one")


def test_a_crash_loop_is_slowed_down(front_end: FrontEndName) -> None:
    """And it says why; it ends by itself once the cause has gone."""
    options = DeviceOptions(front_end=front_end)
    with supervised_device(DESCRIPTION, options, name="one") as device:
        description = device_directory("one").description
        whole = description.read_text()
        description.write_text("{}")
        started_s = time.monotonic()
        kill(device.state.server, signal.SIGKILL)
        state = wait_for("one", lambda state: state.failures >= 9)
        # Five come at once, then there are delays of 0.1, 0.2, 0.4 and 0.8 s.
        assert time.monotonic() - started_s > 1.4
        shown = show_device("one")
        assert shown.health in ("failing", "recovering")
        assert "version" in str(shown.reason) or "missing" in str(shown.reason)
        assert state.supervisor is not None and state.supervisor.is_alive()
        description.write_text(whole)
        wait_for("one", lambda state: state.status == "serving")
        assert device.path is not None
        check_content(device.path)


def test_reads_wait_while_no_server_comes_up(
    front_end: FrontEndName, sparse_path: Path
) -> None:
    """A file that is missing for a while, say, is nobody's reason to fail them."""
    may_be_killed(front_end)
    source = sparse_path / "source"
    source.write_bytes(PATTERN.content(0, MIB))
    segment = FileSegment(offset=0, length=MIB, path=str(source))
    added(front_end, "reissue", Description(MIB, [segment]))
    before = show_device("one")
    assert before.path is not None
    with reading(before.path, PATTERN.part(0, MIB)) as readers:
        source.rename(sparse_path / "elsewhere")
        kill(before.state.server, signal.SIGKILL)
        wait_for("one", lambda state: state.failures >= 8)
        assert "No such file" in str(show_device("one").reason)
        (sparse_path / "elsewhere").rename(source)
        wait_for("one", lambda state: state.status == "serving")
        readers.wait_for_reads(50)
        assert (readers.wrong, readers.errors) == (0, [])
    assert show_device("one").path == before.path
