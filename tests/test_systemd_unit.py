"""The units: what systemd itself says of them, and what must not change."""

from __future__ import annotations

import configparser
import shutil
import sys
from pathlib import Path

import pytest

from btrfs_ublk.process import run

_UNITS = Path(__file__).parents[1] / "systemd"
UNIT = _UNITS / "btrfs-ublk@.service"
VOLUME_UNIT = _UNITS / "btrfs-ublk-volume@.service"
COMMAND = Path(sys.executable).with_name("btrfs-ublk")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
@pytest.mark.parametrize("unit", [UNIT, VOLUME_UNIT], ids=lambda path: path.stem)
def test_systemd_accepts_it(unit: Path, tmp_path: Path) -> None:
    # The command is looked for on systemd's PATH; here it is in a virtual environment.
    text = unit.read_text().replace("=btrfs-ublk ", f"={COMMAND} ")
    text = text.replace("=-btrfs-ublk ", f"=-{COMMAND} ")
    (tmp_path / unit.name).write_text(text)
    instance = tmp_path / unit.name.replace("@", "@one")
    instance.symlink_to(tmp_path / unit.name)
    done = run(["systemd-analyze", "verify", "--man=no", instance], timeout_s=60)
    assert unit.name not in done.stderr and instance.name not in done.stderr


def test_only_the_supervisor_is_signalled() -> None:
    """Or stopping the unit would take the server from under a mounted file system."""
    service = _service(UNIT)
    assert service["KillMode"] == "process"
    assert service["Type"] == "notify"
    assert service["ExecStop"].startswith("-")


@pytest.mark.parametrize("unit", [UNIT, VOLUME_UNIT], ids=lambda path: path.stem)
def test_memory_is_locked_and_kept(unit: Path) -> None:
    service = _service(unit)
    assert service["LimitMEMLOCK"] == "infinity"
    assert service["OOMScoreAdjust"] == "-900"


def test_a_volume_outlives_its_command() -> None:
    service = _service(VOLUME_UNIT)
    assert service["KillMode"] == "process"
    assert (service["Type"], service["RemainAfterExit"]) == ("oneshot", "yes")


def _service(path: Path) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    return unit["Service"]
