"""The server process and its device: with a stand-in that misbehaves on purpose, and on
kernels with ublk for real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Need

from btrfs_ublk.capabilities import BTRFS, LOOP, UBLK, Helper
from btrfs_ublk.errors import (
    BtrfsUblkError,
    CapabilityError,
    LeftoverError,
    UsageError,
)
from btrfs_ublk.gc import collect
from btrfs_ublk.helpers import HELPERS_VARIABLE, SERVER
from btrfs_ublk.ledger import Entry, process_ledger
from btrfs_ublk.process import ProcessIdentity, run
from btrfs_ublk.resources import (
    UblkDevice,
    list_ublk_devices,
    loop_device,
    mounted,
)
from btrfs_ublk.server import (
    BlockServer,
    Description,
    ErrorSegment,
    FileSegment,
    MemsetSegment,
    PatternSegment,
    ZeroSegment,
)
from btrfs_ublk.server import block_server as module
from btrfs_ublk.server import device_records, devices
from btrfs_ublk.server.devices import DeviceRecord, parse_records
from btrfs_ublk.volume import volume

BLOCK = 4096
MIB = 1 << 20
TINY = Description(BLOCK, [ZeroSegment(offset=0, length=BLOCK)])

#: Speaks the protocol; each test puts its misbehaviour in.
STAND_IN = """\
#!{python}
import json, os, signal, socket, sys, time
sys.argv[1:] == ["--list-devices"] and sys.exit(0)
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
control = socket.socket(fileno=int(options["--control-fd"]))
lines = control.makefile("r")
def send(**message): control.sendall(json.dumps(message).encode() + b"\\n")
def ready(**more):
    send(**dict(event="ready", protocol=1, device="{device}", id=0) | more)
def serve():
    ready()
    for line in lines:
        request = json.loads(line)["request"]
        if request == "stats":
            send(reply="stats", stats=dict(reads=3))
        elif request == "stop":
            send(reply="stop")
            send(event="stopped", stats=dict(reads=4))
            sys.exit(0)
{behaviour}
"""

StandIn = Callable[..., None]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    def install(behaviour: str, *, device: Path | str = "/dev/null") -> None:
        path = tmp_path / SERVER
        path.write_text(
            STAND_IN.format(
                python=sys.executable, behaviour=behaviour, device=str(device)
            )
        )
        path.chmod(0o755)
        monkeypatch.setenv(HELPERS_VARIABLE, str(tmp_path))
        # It is small and near: it answers soon, or never.
        monkeypatch.setattr(module, "_REQUEST_TIMEOUT_S", 1.0)
        monkeypatch.setattr(module, "_LAST_WORDS_TIMEOUT_S", 0.2)

    return install


def entered() -> list[str]:
    return [entry.kind for entry in process_ledger().entries()]


class TestWithStandIn:
    def test_up_and_down(self, stand_in: StandIn) -> None:
        stand_in("serve()")
        server = BlockServer(TINY, queues=2, depth=8, max_io_bytes=65536)
        with server:
            assert server.device == Path("/dev/null") and server.device_id == 0
            assert server.stats() == {"reads": 3}
            assert entered() == ["ublk-device"]
            identity = ProcessIdentity.of(server.pid)
            argv = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")
        assert server.final_stats == {"reads": 4}
        assert not identity.is_alive() and entered() == []
        text = b" ".join(argv)
        assert b"--queues 2 --depth 8 --max-io 65536 --tag " in text
        with pytest.raises(BtrfsUblkError, match="does not run"):
            server.stats()
        server.stop()
        with server:  # a second time
            assert server.stats() == {"reads": 3}

    def test_the_description_comes_on_standard_input(self, stand_in: StandIn) -> None:
        stand_in("ready(device=json.load(sys.stdin) and '/dev/null', id=7)\nserve()")
        with BlockServer(TINY) as server:
            assert server.device_id == 7

    @pytest.mark.parametrize(
        ("status", "error"), [(1, BtrfsUblkError), (2, UsageError)]
    )
    def test_death_before_ready(
        self, stand_in: StandIn, status: int, error: type[BtrfsUblkError]
    ) -> None:
        stand_in(f"print('the reason', file=sys.stderr); sys.exit({status})")
        with pytest.raises(error, match="before its device was ready") as caught:
            with BlockServer(TINY):
                pass
        assert "the reason" in str(caught.value)
        assert f"status {status}" in str(caught.value) and entered() == []

    def test_death_by_signal(self, stand_in: StandIn) -> None:
        stand_in("os.kill(os.getpid(), signal.SIGSEGV)")
        with pytest.raises(BtrfsUblkError, match="ended by SIGSEGV before"):
            with BlockServer(TINY):
                pass

    def test_silence(self, stand_in: StandIn) -> None:
        stand_in("print('busy', file=sys.stderr, flush=True); time.sleep(60)")
        start_s = time.monotonic()
        with pytest.raises(BtrfsUblkError, match="not send the ready event in time"):
            with BlockServer(TINY, ready_timeout_s=0.5):
                pass
        assert time.monotonic() - start_s < 10

    @pytest.mark.parametrize(
        ("behaviour", "message"),
        [
            ("control.sendall(b'garbage\\n'); time.sleep(60)", "sent b'garbage'"),
            ("control.sendall(b'[]\\n'); time.sleep(60)", r"sent b'\[\]'"),
            ("control.sendall(bytes(2 << 20)); time.sleep(60)", "endless line"),
            ("control.sendall(b'half')", "before its device was ready"),
            ("send(event='stopped'); time.sleep(60)", "not the ready event"),
            ("ready(protocol=2); time.sleep(60)", "speaks protocol 2, not 1"),
            ("ready(device=None); time.sleep(60)", "does not name its device"),
            ("ready(device='/dev/no-such'); time.sleep(60)", "did not appear"),
        ],
    )
    def test_nonsense(self, stand_in: StandIn, behaviour: str, message: str) -> None:
        stand_in(behaviour)
        with pytest.raises(BtrfsUblkError, match=message):
            with BlockServer(TINY):
                pass
        assert entered() == []

    def test_a_server_that_does_not_stop_is_killed(self, stand_in: StandIn) -> None:
        stand_in(
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(60)"
        )
        start_s = time.monotonic()
        with BlockServer(TINY, stop_timeout_s=1.5) as server:
            identity = ProcessIdentity.of(server.pid)
        assert not identity.is_alive()
        assert time.monotonic() - start_s < 10

    def test_a_server_that_is_slow_to_stop_is_given_its_time(
        self, stand_in: StandIn
    ) -> None:
        """More than its answers may take; it must not be cut off in mid teardown."""
        stand_in(
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(2.5)\n"
            "send(reply='stop'); send(event='stopped', stats={}); sys.exit(5)"
        )
        with BlockServer(TINY) as server:
            child = server._child
        assert child is not None and child.returncode == 5  # and not killed

    def test_it_may_be_entered_again_after_a_failure(self, stand_in: StandIn) -> None:
        server = BlockServer(TINY)
        stand_in("sys.exit(1)")
        with pytest.raises(BtrfsUblkError, match="before its device was ready"):
            server.__enter__()
        stand_in("serve()")
        with server:
            assert server.stats() == {"reads": 3}

    def test_an_answer_that_comes_too_late_is_not_taken_for_another(
        self, stand_in: StandIn
    ) -> None:
        stand_in(
            "ready()\n"
            "for number, line in enumerate(lines):\n"
            "    request = json.loads(line)['request']\n"
            "    number or time.sleep(1.5)\n"
            "    send(**(dict(reply='stats', stats=number) if number else"
            " dict(error='no')))\n"
            "    if request == 'stop': break\n"
        )
        with pytest.raises(BtrfsUblkError):  # the stand-in does not stop as it should
            with BlockServer(TINY) as server:
                with pytest.raises(BtrfsUblkError, match="not send a reply to stats"):
                    server.stats()
                assert server.stats() == 1
                assert server.stats() == 2
                raise BtrfsUblkError("end")

    def test_a_server_that_died_meanwhile(self, stand_in: StandIn) -> None:
        stand_in("serve()")
        with BlockServer(TINY) as server:
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(BtrfsUblkError, match="server ended|cannot ask"):
                server.stats()
        assert entered() == []

    def test_a_failing_request_is_reported(self, stand_in: StandIn) -> None:
        stand_in("ready(); lines.readline(); send(error='no'); time.sleep(60)")
        with pytest.raises(BtrfsUblkError, match="answers stats with .*no"):
            with BlockServer(TINY) as server:
                server.stats()

    def test_a_missing_helper_says_how_to_build_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(HELPERS_VARIABLE, str(tmp_path))
        with pytest.raises(CapabilityError, match="build the helpers"):
            with BlockServer(TINY):
                pass
        assert entered() == []

    def test_the_server_notices_the_death_of_its_owner(
        self, stand_in: StandIn, test_root: Path
    ) -> None:
        stand_in("serve()")
        script = (
            "import time\n"
            "from btrfs_ublk.server import *\n"
            "zero = ZeroSegment(offset=0, length=4096)\n"
            "with BlockServer(Description(4096, [zero])) as server:\n"
            "    print(server.pid, flush=True)\n"
            "    time.sleep(60)\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
        ) as owner:
            assert owner.stdout is not None
            server = ProcessIdentity.of(int(owner.stdout.readline()))
            owner.kill()
        assert server.wait(timeout_s=10)
        report = collect()
        assert report.is_clean and len(report.ledgers) == 1

    @pytest.mark.native
    def test_a_mounted_device_is_not_taken_away(
        self, stand_in: StandIn, sparse_path: Path
    ) -> None:
        image, target = sparse_path / "image", sparse_path / "mnt"
        target.mkdir()
        with image.open("wb") as file:
            file.truncate(128 * MIB)
        run(["mkfs.btrfs", "-q", image], timeout_s=60)
        with loop_device(image) as loop:
            stand_in("serve()", device=loop.path)
            server = BlockServer(TINY)
            with mounted(loop.path, target):
                with pytest.raises(LeftoverError, match=f"mounted at {target}"):
                    with server:
                        pass
                assert server.stats() == {"reads": 3}
                with pytest.raises(ZeroDivisionError) as caught:
                    try:
                        1 / 0
                    except ZeroDivisionError as error:
                        server.__exit__(type(error), error, None)
                        raise
                assert "mounted at" in caught.value.__notes__[0]
            server.stop()


class TestRecords:
    """Devices of others that hang, or that we do not understand."""

    def test_what_makes_no_sense_is_passed_over(self) -> None:
        text = (
            '{"id":3,"state":"unknown"}\n'
            "nonsense\n[]\n7\n{}\n"
            '{"id":4,"state":"live","server_pid":9,"tag":"0123456789abcdef","x":1}\n'
        )
        assert parse_records(text) == [
            DeviceRecord(3, "unknown", None, None),
            DeviceRecord(4, "live", 9, "0123456789abcdef"),
        ]

    @pytest.fixture
    def hung(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Device 3 does not answer."""
        record = DeviceRecord(3, "unknown", None, None)
        device = UblkDevice(3, Path("/dev/ublkc3"), None, None, None)
        monkeypatch.setattr(devices, "list_ublk_devices", lambda: [device])
        monkeypatch.setattr(devices, "device_records", lambda: [record])

    def test_a_hung_device_of_others_is_not_in_the_way(self, hung: None) -> None:
        ours = Entry(1, "ublk-device", "0" * 16, {"device": "/dev/ublkb4"})
        assert not devices.remove_device(ours)

    @pytest.mark.parametrize("details", [{"device": "/dev/ublkb3"}, {}])
    def test_a_hung_device_that_may_be_ours_is_left(
        self, hung: None, details: dict[str, str]
    ) -> None:
        ours = Entry(1, "ublk-device", "0" * 16, details)
        with pytest.raises(LeftoverError, match="ublk device 3 does not answer"):
            devices.remove_device(ours)


def read(path: Path, offset: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


@pytest.mark.ublk
class TestWithUblk:
    @pytest.fixture(autouse=True)
    def _needs(self, need: Need) -> Iterator[None]:
        need(UBLK, Helper(SERVER))
        yield

    def test_what_is_described_is_read(self, sparse_path: Path) -> None:
        data = os.urandom(4 * BLOCK)
        (sparse_path / "file").write_bytes(data)
        description = Description.filled(
            1 << 40,
            [
                FileSegment(offset=0, length=4 * BLOCK, path=str(sparse_path / "file")),
                MemsetSegment(offset=4 * BLOCK, length=BLOCK, byte=97),
                PatternSegment(offset=1 << 39, length=MIB),
                ErrorSegment(offset=1 << 20, length=BLOCK),
            ],
            gaps="zero",
        )
        with BlockServer(description, queues=1, depth=16) as server:
            assert read(server.device, 0, 6 * BLOCK) == data + b"a" * BLOCK + bytes(
                BLOCK
            )
            word = (1 << 39).to_bytes(8, "little")
            assert read(server.device, 1 << 39, 8) == word
            with pytest.raises(OSError):
                read(server.device, 1 << 20, BLOCK)
            assert server.stats()["reads"] > 0
            (device,) = list_ublk_devices()
            assert device.size_bytes == 1 << 40 and device.read_only
            assert device.block_path == server.device
            (record,) = device_records()
            assert record.server_pid == server.pid and record.state == "live"
            assert record.tag == process_ledger().entries()[0].tag
        assert server.final_stats is not None and server.final_stats["errors"] >= 1
        assert not device.block_path.exists()

    def test_a_missing_file_is_wrong_usage(self, sparse_path: Path) -> None:
        segment = FileSegment(offset=0, length=BLOCK, path=str(sparse_path / "none"))
        with pytest.raises((UsageError, BtrfsUblkError), match="none"):
            with BlockServer(Description(BLOCK, [segment])):
                pass

    def test_a_killed_server_leaves_nothing(self) -> None:
        with BlockServer(TINY) as server:
            os.kill(server.pid, signal.SIGKILL)
        assert list_ublk_devices() == []

    def test_a_mounted_device_is_not_taken_away(self, sparse_path: Path) -> None:
        image, target = sparse_path / "image", sparse_path / "mnt"
        target.mkdir()
        with image.open("wb") as file:
            file.truncate(128 * MIB)
        run(["mkfs.btrfs", "-q", image], timeout_s=60)
        segment = FileSegment(offset=0, length=128 * MIB, path=str(image))
        server = BlockServer(Description(128 * MIB, [segment]))
        with pytest.raises(LeftoverError, match=f"mount target={target}"):
            with server:
                mount = mounted(server.device, target, read_only=True)
                mount.__enter__()
        mount.__exit__(None, None, None)
        server.stop()

    def test_a_busy_mount_keeps_the_server_and_its_seed(
        self, need: Need, sparse_path: Path
    ) -> None:
        need(BTRFS, LOOP)
        target, images = sparse_path / "mnt", sparse_path / "images"
        target.mkdir()
        images.mkdir()
        pattern = PatternSegment(offset=0, length=1 << 30)
        with pytest.raises(LeftoverError, match="still mounted and busy"):
            with volume(
                target, [pattern], virtual_data_size=1 << 30, parent=images
            ) as made:
                clone = made.clone("clone", offset=BLOCK, size_bytes=BLOCK)
                user = subprocess.Popen(["sleep", "60"], cwd=target)
        content = clone.read_bytes()
        left = {path.name for path in images.rglob("*.img")}
        user.kill()
        user.wait(10)
        outcomes = process_ledger().sweep()
        made.server.stop()  # only its descriptors are left to be closed
        assert content == pattern.content(BLOCK, BLOCK)
        assert left == {"seed.img", "writable.img"}
        assert {outcome.result for outcome in outcomes} == {"removed"}
        assert entered() == [] and list(images.iterdir()) == []

    def test_gc_removes_the_device_of_a_killed_pair(self, sparse_path: Path) -> None:
        """Owner and server are both killed: the device stays until gc."""
        script = (
            "import time\n"
            "from btrfs_ublk.server import *\n"
            "zero = ZeroSegment(offset=0, length=4096)\n"
            "with BlockServer(Description(4096, [zero])) as server:\n"
            "    print(server.pid, flush=True)\n"
            "    time.sleep(60)\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
        ) as owner:
            assert owner.stdout is not None
            server = int(owner.stdout.readline())
            os.kill(server, signal.SIGSTOP)
            owner.kill()
            os.kill(server, signal.SIGKILL)
        report = collect()
        assert report.is_clean, json.dumps(report.to_dict())
        results = [o.result for ledger in report.ledgers for o in ledger.outcomes]
        assert results == ["removed"]
