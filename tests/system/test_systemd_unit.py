"""The units: what systemd itself says of them, and what must not change."""

from __future__ import annotations

import configparser
import os
import re
import shutil
from pathlib import Path

import pytest
from support.installed import COMMAND, install_units
from support.paths import PROJECT

from btrfs_ublk.base.process import run

_UNITS = PROJECT / "btrfs_ublk/systemd"
DAEMON_UNIT = _UNITS / "btrfs-ublk.service"
SOCKET_UNIT = _UNITS / "btrfs-ublk.socket"
UNIT = _UNITS / "btrfs-ublk@.service"
VOLUME_UNIT = _UNITS / "btrfs-ublk-volume@.service"
SNAPSHOTTER_UNIT = _UNITS / "btrfs-ublk-snapshotter.service"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory with the units."""
    install_units(tmp_path)
    return tmp_path


def test_all_are_installed_with_the_path_of_the_command(installed: Path) -> None:
    names = [path.name for path in sorted(_UNITS.iterdir())]
    assert sorted(os.listdir(installed)) == names
    for name in names:
        wanted = re.sub(
            r"(?m)^(Exec\w+=-?)btrfs-ublk ",
            rf"\g<1>{COMMAND} ",
            (_UNITS / name).read_text(),
        )
        assert (installed / name).read_text() == wanted
        commands = 3 if "@" in name else int(name.endswith(".service"))
        assert wanted.count(str(COMMAND)) == commands


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
@pytest.mark.parametrize(
    "unit",
    [DAEMON_UNIT, SOCKET_UNIT, UNIT, VOLUME_UNIT, SNAPSHOTTER_UNIT],
    ids=lambda path: path.name,
)
def test_systemd_accepts_it(unit: Path, installed: Path) -> None:
    instance = installed / unit.name.replace("@", "@one")
    if instance.name != unit.name:
        instance.symlink_to(installed / unit.name)
    done = run(["systemd-analyze", "verify", "--man=no", instance], timeout_s=60)
    assert unit.name not in done.stderr and instance.name not in done.stderr


def test_only_the_daemon_is_signalled() -> None:
    """Or stopping the unit would take servers from under mounted file systems."""
    service = _service(DAEMON_UNIT)
    assert service["KillMode"] == "process"
    assert service["Type"] == "notify"


@pytest.mark.parametrize(
    "unit", [DAEMON_UNIT, UNIT, VOLUME_UNIT], ids=lambda path: path.stem
)
def test_memory_is_locked_and_kept(unit: Path) -> None:
    """systemd stops a unit, by default, when the OOM killer takes one process of it."""
    service = _service(unit)
    assert service["LimitMEMLOCK"] == "infinity"
    assert service["OOMScoreAdjust"] == "-900"
    assert service["OOMPolicy"] == "continue"


def test_the_daemon_is_never_given_up() -> None:
    """Or systemd would forget what it stores, and readers would wait for nobody."""
    unit = _sections(DAEMON_UNIT)
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    service = unit["Service"]
    assert service["Restart"] == "on-failure"
    assert service["TasksMax"] == "infinity"


def test_a_snapshotter_answers_before_containerd_asks_again() -> None:
    """containerd tries after a second; if that is too early, up to two s later."""
    unit = _sections(SNAPSHOTTER_UNIT)
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Service"]["RestartSec"] == "100ms"
    assert unit["Service"]["RestartPreventExitStatus"] == "2 3"


def test_only_root_may_ask_the_daemon() -> None:
    socket = _sections(SOCKET_UNIT)["Socket"]
    assert (socket["SocketMode"], socket["DirectoryMode"]) == ("0600", "0700")


@pytest.mark.parametrize("unit", [UNIT, VOLUME_UNIT], ids=lambda path: path.stem)
def test_it_outlives_its_command(unit: Path) -> None:
    service = _service(unit)
    assert service["KillMode"] == "process"
    assert (service["Type"], service["RemainAfterExit"]) == ("oneshot", "yes")


def test_a_snapshotter_is_stopped_alone() -> None:
    """It ends with 143 by SIGTERM, which is no failure."""
    service = _service(SNAPSHOTTER_UNIT)
    assert service["KillMode"] == "process"
    assert service["Type"] == "notify"
    assert service["SuccessExitStatus"] == "143"


def _service(path: Path) -> configparser.SectionProxy:
    return _sections(path)["Service"]


def _sections(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    return unit
