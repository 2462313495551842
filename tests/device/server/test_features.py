"""What the kernel offers: the server's table, the command, options that insist."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.needs import Need, inapplicable

from btrfs_ublk.base.capabilities import FUSE, ROOT, UBLK
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.kernel.ublk_devices import list_ublk_devices
from btrfs_ublk.server import BlockServer, Description, ErrorSegment, PatternSegment
from btrfs_ublk.server.features import kernel_features
from btrfs_ublk.units import MIB

# linux/ublk_cmd.h
NO_AUTO_PART_SCAN = 1 << 18


def run_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helper_path(SERVER), *arguments], capture_output=True, text=True, timeout=60
    )


def test_the_kernel_tells_its_fuse_protocol(need: Need) -> None:
    need(ROOT, FUSE)
    mounts = Path("/proc/self/mountinfo").read_text()
    _, fuse = kernel_features()[0]
    assert fuse.protocol is not None
    major, minor = map(int, fuse.protocol.split("."))
    assert major == 7 and minor >= 31
    # FUSE_HAS_RESEND came with 7.40.
    offered = {feature.name: feature.offered for feature in fuse.features}
    assert offered["resend"] == (minor >= 40)
    assert Path("/proc/self/mountinfo").read_text() == mounts


#: Nothing but what a scan for partitions would look at, and stumble over.
FAILING = Description(
    2 * MIB,
    [ErrorSegment(offset=0, length=MIB), PatternSegment(offset=MIB, length=MIB)],
)


def _offered(name: str) -> bool:
    features = kernel_features()[0][0].features
    return any(feature.name == name and feature.offered for feature in features)


@pytest.mark.ublk
def test_a_device_starts_without_a_read(need: Need) -> None:
    need(UBLK)
    if not _offered("no-auto-part-scan"):
        inapplicable("this kernel's driver always looks for partitions")
    with BlockServer(FAILING, front_end="ublk") as server:
        (line,) = run_server("--list-devices").stdout.splitlines()
        assert json.loads(line)["flags"] & NO_AUTO_PART_SCAN
        assert server.stats().kinds["error"].reads == 0


@pytest.mark.ublk
def test_a_feature_can_be_insisted_on_and_done_without(
    need: Need, tmp_path: Path
) -> None:
    need(UBLK)
    path = tmp_path / "description.json"
    path.write_text(FAILING.to_json())
    if not _offered("no-auto-part-scan"):
        done = run_server("--feature", "no-auto-part-scan", str(path))
        assert done.returncode == CapabilityError.exit_status
        assert "does not offer it" in done.stderr and "Linux 7.0" in done.stderr
        assert list_ublk_devices() == []
        return
    for option, wanted in (("--feature", True), ("--no-feature", False)):
        argv = [helper_path(SERVER), option, "no-auto-part-scan", str(path)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            lines = run_server("--list-devices").stdout.splitlines()
            process.terminate()
            assert process.wait(60) == 0
        records = {record["id"]: record for record in map(json.loads, lines)}
        flags = records[ready["id"]]["flags"]
        assert bool(flags & NO_AUTO_PART_SCAN) == wanted
