"""The owner of a server process, against a stand-in that misbehaves on purpose.

With real servers: test_device.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from btrfs_ublk.base.gc import collect
from btrfs_ublk.base.helpers import HELPERS_VARIABLE, SERVER
from btrfs_ublk.base.ledger import Entry, process_ledger
from btrfs_ublk.base.process import ProcessIdentity, run
from btrfs_ublk.errors import (
    BtrfsUblkError,
    CapabilityError,
    LeftoverError,
    UsageError,
)
from btrfs_ublk.kernel import UblkDevice, loop_device, mounted
from btrfs_ublk.server import BlockServer, Description, ZeroSegment
from btrfs_ublk.server import block_server as module
from btrfs_ublk.server import devices, ublk
from btrfs_ublk.server.devices import DeviceRecord, parse_records

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
def stats(reads):
    kinds = "errors read_bytes writes write_bytes flushes discards discard_bytes"
    kinds += " write_zeroes write_zeroes_bytes refused"
    return dict.fromkeys(kinds.split(), 0) | dict(reads=reads, kinds={{}}, queues=[])
def ready(**more):
    send(**dict(event="ready", protocol=1, device="{device}", id=0) | more)
def serve():
    ready()
    for line in lines:
        request = json.loads(line)["request"]
        if request == "stats":
            send(reply="stats", stats=stats(3))
        elif request == "stop":
            send(reply="stop")
            send(event="stopped", stats=stats(4))
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
        # Its device is a name that it tells, so the kernel needs no ublk.
        monkeypatch.setattr(
            module, "choose_front_end", lambda _, **options: ublk.UblkFrontEnd()
        )
        # It is small and near: it answers soon, or never.
        monkeypatch.setattr(module, "_REQUEST_TIMEOUT_S", 1.0)
        monkeypatch.setattr(ublk, "_NODE_TIMEOUT_S", 1.0)
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
            assert server.stats().reads == 3
            assert entered() == ["ublk-device"]
            identity = ProcessIdentity.of(server.pid)
            argv = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")
        assert server.final_stats and server.final_stats.reads == 4
        assert not identity.is_alive() and entered() == []
        text = b" ".join(argv)
        options = b"--front-end ublk --queues 2 --depth 8 --max-io 65536 --tag "
        assert options in text
        with pytest.raises(BtrfsUblkError, match="does not run"):
            server.stats()
        server.stop()
        with server:  # a second time
            assert server.stats().reads == 3

    def test_the_description_comes_on_standard_input(self, stand_in: StandIn) -> None:
        stand_in("ready(device=json.load(sys.stdin) and '/dev/null', id=7)\nserve()")
        with BlockServer(TINY) as server:
            assert server.device_id == 7

    @pytest.mark.parametrize(
        ("status", "error"),
        [(1, BtrfsUblkError), (2, UsageError), (3, CapabilityError)],
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
        assert time.monotonic() - start_s < 40

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
        assert time.monotonic() - start_s < 40

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
            assert server.stats().reads == 3

    def test_an_answer_that_comes_too_late_is_not_taken_for_another(
        self, stand_in: StandIn
    ) -> None:
        stand_in(
            "ready(); lines.readline(); second = lines.readline()\n"
            "send(error='no'); send(reply='stats', stats=stats(1)); lines.readline()\n"
            "send(reply='stats', stats=stats(2)); lines.readline()\n"
        )
        # The stand-in does not stop as it should, which does not hide this error.
        with pytest.raises(BtrfsUblkError, match="^end$"):
            with BlockServer(TINY) as server:
                with pytest.raises(BtrfsUblkError, match="not send a reply to stats"):
                    server.stats()
                assert server.stats().reads == 1
                assert server.stats().reads == 2
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
            "from btrfs_ublk.server import block_server, ublk\n"
            "block_server.choose_front_end = lambda _, **options: ublk.UblkFrontEnd()\n"
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
                assert server.stats().reads == 3
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
