"""What the doctor says of this machine, and of poorer ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from btrfs_ublk.base.capabilities import ROOT, UBLK
from btrfs_ublk.base.helpers import HELPERS_VARIABLE, MKSEED


def _doctor(
    *arguments: str, program: tuple[str, ...] = ("-m", "btrfs_ublk.cli.main")
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program, "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def _abilities(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads(done.stdout)["abilities"]}


def test_what_is_missing_has_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("apt-get", "setpriv"):
        (tmp_path / name).symlink_to("/bin/true")
    helpers = tmp_path / "helpers"
    helpers.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(HELPERS_VARIABLE, str(helpers))
    done = _doctor("--json")
    assert done.returncode == 3
    found = _abilities(done)
    assert {found[x]["answer"] for x in ("seeds", "benchmarks")} == {"no"}
    commands = {
        finding["what"]: finding["command"]
        for each in found.values()
        for finding in each["findings"]
        if finding["ok"] is False
    }
    sudo = "" if os.geteuid() == 0 else "sudo "
    assert commands["fio"] == f"{sudo}apt-get install fio"
    assert commands["btrfs"] == f"{sudo}apt-get install btrfs-progs"
    assert commands[MKSEED] == "scripts/setup --build"
    text = _doctor().stdout
    assert "Not yet: make seeds, serve with fuse or ublk" in text
    assert f"$ {sudo}apt-get install fio" in text


def test_it_loads_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if UBLK.probe() is None or ROOT.probe() is not None:
        pytest.skip("does not apply: there is nothing that root would load")
    log = tmp_path / "log"
    modprobe = tmp_path / "modprobe"
    modprobe.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    modprobe.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert _abilities(_doctor("--json"))["ublk"]["answer"] == "yes"  # it would come
    calls = log.read_text().splitlines()
    assert "--dry-run ublk_drv" in calls
    assert all(call.startswith("--dry-run ") for call in calls)
