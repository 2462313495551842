"""The unit: what systemd itself says of it, and what must not change."""

from __future__ import annotations

import configparser
import shutil
import sys
from pathlib import Path

import pytest

from btrfs_ublk.process import run

UNIT = Path(__file__).parents[1] / "systemd" / "btrfs-ublk@.service"
COMMAND = Path(sys.executable).with_name("btrfs-ublk")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_systemd_accepts_it(tmp_path: Path) -> None:
    # The command is looked for on systemd's PATH; here it is in a virtual environment.
    text = UNIT.read_text().replace("=btrfs-ublk ", f"={COMMAND} ")
    text = text.replace("=-btrfs-ublk ", f"=-{COMMAND} ")
    (tmp_path / UNIT.name).write_text(text)
    instance = tmp_path / UNIT.name.replace("@", "@one")
    instance.symlink_to(tmp_path / UNIT.name)
    done = run(["systemd-analyze", "verify", "--man=no", instance], timeout_s=60)
    assert UNIT.name not in done.stderr and instance.name not in done.stderr


def test_only_the_supervisor_is_signalled() -> None:
    """Or stopping the unit would take the server from under a mounted file system."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    assert service["KillMode"] == "process"
    assert service["Type"] == "notify"
    assert service["ExecStop"].startswith("-")
