"""A report for maintainers has what they need, and no secrets."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.devices import device_command, map_command
from support.needs import Need

from btrfs_ublk.base.capabilities import FUSE, LOOP, ROOT, Helper
from btrfs_ublk.base.helpers import SERVER
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.server import Description, LazySegment
from btrfs_ublk.units import MIB

SECRET = "hunter2-is-planted"


def any_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "btrfs_ublk.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.fuse
@pytest.mark.usefixtures("in_process")
def test_report_of_a_machine_with_a_device(
    tmp_path: Path, need: Need, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(ROOT, FUSE, LOOP, Helper(SERVER))
    segment = LazySegment(offset=0, length=MIB, map=f"{tmp_path}/token={SECRET}.map")
    path = tmp_path / "description.json"
    path.write_text(Description(MIB, [segment]).to_json())
    done = device_command("up", "planted", path, "--front-end", "fuse")
    assert done.returncode == 0, done.stderr
    try:
        url = f"http://127.0.0.1:9/image?X-Amz-Signature={SECRET}"
        done = map_command("add", "planted", "--url", url, "--size", "64K")
        assert done.returncode == 0, done.stderr
        with device_directory("planted").log.open("a") as log:
            log.write(f"> Authorization: Bearer {SECRET}\n{SECRET}-plain\nkept line\n")
        monkeypatch.setenv("BTRFS_UBLK_TEST", f"http://u:{SECRET}@host/")
        monkeypatch.setenv("REGISTRY_PASSWORD", f"{SECRET}-plain")
        monkeypatch.setenv("UNRELATED", SECRET)
        report = tmp_path / "report.tar.gz"
        done = any_command("bugreport", "-o", report)
        assert done.returncode == 0, done.stderr
        listed = done.stdout
    finally:
        assert device_command("down", "planted").returncode == 0
    assert stat.S_IMODE(report.stat().st_mode) == 0o600
    with tarfile.open(report) as tar:
        tar.extractall(tmp_path / "out", filter="data")
    top = tmp_path / "out" / "report"
    files = {
        str(path.relative_to(top)): path.read_text()
        for path in top.rglob("*")
        if path.is_file()
    }
    assert all(name in listed for name in files)
    for name, text in files.items():
        assert SECRET not in text, name
    device = json.loads(files["devices/planted/device.json"])
    assert device["health"] == "serving" and device["stats"]["kinds"]
    assert "kept line" in files["devices/planted/log"]
    assert "http://127.0.0.1:9/image?" in files["devices/planted/map.json"]
    assert json.loads(files["devices/planted/description.json"])["size"] == MIB
    assert json.loads(files["versions.json"])["kernel"] == os.uname().release
    assert "UNRELATED" not in files["environment.json"]
    assert {"doctor.json", "features.json", "kernel.log"} <= set(files)
    assert {"ledgers.json", "volumes.json"} <= set(files)
