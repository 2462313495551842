"""The owner of a server process, against a stand-in that misbehaves on purpose.

With real servers: test_device.py.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from btrfs_ublk.base.helpers import HELPERS_VARIABLE, SERVER
from btrfs_ublk.base.ledger import Entry, process_ledger
from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, UsageError
from btrfs_ublk.kernel import UblkDevice
from btrfs_ublk.server import BlockServer, Description, ZeroSegment
from btrfs_ublk.server import block_server as module
from btrfs_ublk.server import devices, ublk
from btrfs_ublk.server.devices import DeviceRecord

BLOCK = 4096
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

    def test_death_before_ready(self, stand_in: StandIn) -> None:
        for status, error in ((1, BtrfsUblkError), (2, UsageError)):
            stand_in(f"print('the reason', file=sys.stderr); sys.exit({status})")
            with pytest.raises(error, match="before its device was ready") as caught:
                with BlockServer(TINY):
                    pass
            assert "the reason" in str(caught.value)
            assert f"status {status}" in str(caught.value) and entered() == []

    def test_silence(self, stand_in: StandIn) -> None:
        stand_in("print('busy', file=sys.stderr, flush=True); time.sleep(60)")
        start_s = time.monotonic()
        with pytest.raises(BtrfsUblkError, match="not send the ready event in time"):
            with BlockServer(TINY, ready_timeout_s=0.5):
                pass
        assert time.monotonic() - start_s < 40

    def test_nonsense(self, stand_in: StandIn) -> None:
        for behaviour, message in (
            ("control.sendall(b'garbage\\n'); time.sleep(60)", "sent b'garbage'"),
            ("control.sendall(bytes(2 << 20)); time.sleep(60)", "endless line"),
            ("control.sendall(b'half')", "before its device was ready"),
            ("ready(protocol=2); time.sleep(60)", "speaks protocol 2, not 1"),
            ("ready(device='/dev/no-such'); time.sleep(60)", "did not appear"),
        ):
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


class TestRecords:
    """Devices of others that hang, or that we do not understand."""

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

    def test_a_hung_device_that_may_be_ours_is_left(self, hung: None) -> None:
        ours = Entry(1, "ublk-device", "0" * 16, {"device": "/dev/ublkb3"})
        with pytest.raises(LeftoverError, match="ublk device 3 does not answer"):
            devices.remove_device(ours)
