"""What only ublk devices have: numbers, records of the driver that carry tags, and
features of the driver."""

import functools
import json
import mmap
import os
import platform
import subprocess
from pathlib import Path

import pytest
from support.devices import small_seed
from support.needs import Need, inapplicable
from support.processes import ServerProcess

from btrfs_ublk.base.capabilities import UBLK
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.kernel import mounted
from btrfs_ublk.kernel.blockdev import wait_for_node
from btrfs_ublk.kernel.ublk_devices import list_ublk_devices
from btrfs_ublk.server import (
    BlockServer,
    Description,
    ErrorSegment,
    FileSegment,
    PatternSegment,
    ZeroSegment,
    device_records,
)
from btrfs_ublk.server.features import kernel_features
from btrfs_ublk.server.front_ends import kernel_may_crash
from btrfs_ublk.units import MIB
from btrfs_ublk.volume.temporary import virtual_file_of

pytestmark = pytest.mark.ublk

ZEROES = Description(MIB, [ZeroSegment(offset=0, length=MIB)])

serve = functools.partial(BlockServer, front_end="ublk")


@pytest.fixture(autouse=True)
def ublk(need: Need) -> None:
    need(UBLK)


def run_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helper_path(SERVER), *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.gate_ublk
def test_auto_is_ublk_where_the_kernel_survives_its_servers() -> None:
    may_crash = kernel_may_crash(platform.release())
    with BlockServer(ZEROES) as server:
        assert server.front_end == ("fuse" if may_crash else "ublk")


@pytest.mark.gate_ublk
def test_a_writable_device_flushes(sparse_path: Path) -> None:
    """What the block layer may rely on, and that a sync arrives as a flush."""
    path = sparse_path / "file"
    path.write_bytes(bytes(MIB))
    writable = Description(
        MIB,
        [FileSegment(offset=0, length=MIB, path=str(path), writable=True)],
        read_only=False,
    )
    with serve(writable) as server:
        queue = Path(f"/sys/block/{server.device.name}/queue")
        assert (queue / "write_cache").read_text() == "write back\n"
        assert (queue / "fua").read_text() == "1\n"
        assert int((queue / "discard_max_bytes").read_text()) > 0
        assert int((queue / "write_zeroes_max_bytes").read_text()) > 0
        with server.device.open("r+b", buffering=0) as file:
            file.write(b"w" * 4096)
            os.fsync(file.fileno())
        written = server.stats().kinds["file"]
        assert written.writes >= 1 and written.flushes >= 1
    assert path.read_bytes() == b"w" * 4096 + bytes(MIB - 4096)


@pytest.mark.gate_ublk
def test_the_drivers_record() -> None:
    with serve(ZEROES) as server:
        (device,) = list_ublk_devices()
        assert device.size_bytes == MIB and device.read_only
        assert device.block_path == server.device
        (record,) = device_records()
        assert record.server_pid == server.pid and record.state == "live"
        assert record.tag == process_ledger().entries()[0].tag
    assert not device.block_path.exists()


@pytest.mark.gate_ublk
def test_a_device_is_deleted_by_its_tag_only() -> None:
    with serve(ZEROES) as server:
        (record,) = device_records()
        wrong = f"{int(record.tag, 16) ^ 1:016x}"
        done = run_server("--delete-device", str(server.device_id), "--tag", wrong)
        assert done.returncode == 1
        assert "left alone" in done.stderr
        assert read_direct(server.device, 0, 4096) == bytes(4096)


def test_a_device_in_use_does_not_stop(sparse_path: Path) -> None:
    """The server refuses, whatever its owner has looked at before, and serves on."""
    seed, target = small_seed(sparse_path)
    with ServerProcess(seed.description([])) as server:
        assert server.wait_ready()["safe_stop"]
        wait_for_node(server.device, timeout_s=10)
        with mounted(server.device, target, read_only=True):
            reply = server.request("stop")
            assert reply == {"error": "the device is in use", "in_use": True}
            with virtual_file_of(seed, target) as virtual:
                assert virtual.exists()
            assert server.request("info")["reply"] == "info"
        # Who only has it open does not keep it, as udev would.
        os.close(os.open(server.device, os.O_RDONLY))
        assert server.request("stop") == {"reply": "stop"}
        assert server.process.wait(60) == 0
    assert not list_ublk_devices()


def test_an_open_device_is_stopped() -> None:
    """Nothing can be read of it then."""
    with ServerProcess(ZEROES) as server:
        server.wait_ready()
        wait_for_node(server.device, timeout_s=10)
        fd = os.open(server.device, os.O_RDONLY | os.O_DIRECT)
        try:
            assert server.request("stop") == {"reply": "stop"}
            assert server.process.wait(60) == 0
            assert os.preadv(fd, [mmap.mmap(-1, 4096)], 0) == 0
        finally:
            os.close(fd)
    assert not list_ublk_devices()


# linux/ublk_cmd.h
NO_AUTO_PART_SCAN = 1 << 18


#: Nothing but what a scan for partitions would look at, and stumble over.
FAILING = Description(
    2 * MIB,
    [ErrorSegment(offset=0, length=MIB), PatternSegment(offset=MIB, length=MIB)],
)


def _offered(name: str) -> bool:
    features = kernel_features()[0][0].features
    return any(feature.name == name and feature.offered for feature in features)


def test_a_device_starts_without_a_read(need: Need) -> None:
    need(UBLK)
    if not _offered("no-auto-part-scan"):
        inapplicable("this kernel's driver always looks for partitions")
    with BlockServer(FAILING, front_end="ublk") as server:
        (line,) = run_server("--list-devices").stdout.splitlines()
        assert json.loads(line)["flags"] & NO_AUTO_PART_SCAN
        assert server.stats().kinds["error"].reads == 0


def test_a_feature_can_be_insisted_on(need: Need, tmp_path: Path) -> None:
    need(UBLK)
    path = tmp_path / "description.json"
    path.write_text(FAILING.to_json())
    if not _offered("no-auto-part-scan"):
        done = run_server("--feature", "no-auto-part-scan", str(path))
        assert done.returncode == CapabilityError.exit_status
        assert "does not offer it" in done.stderr and "Linux 7.0" in done.stderr
        assert list_ublk_devices() == []
        return
    argv = [helper_path(SERVER), "--feature", "no-auto-part-scan", str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        lines = run_server("--list-devices").stdout.splitlines()
        process.terminate()
        assert process.wait(60) == 0
    records = {record["id"]: record for record in map(json.loads, lines)}
    assert records[ready["id"]]["flags"] & NO_AUTO_PART_SCAN
