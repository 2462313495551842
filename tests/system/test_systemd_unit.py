"""The units: what systemd itself says of them, and what must not change."""

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


#: systemd stops a unit, by default, when the OOM killer takes one process of it.
_IN_MEMORY = {"LimitMEMLOCK": "infinity", "OOMScoreAdjust": "-900"}
_IN_MEMORY |= {"OOMPolicy": "continue"}
#: Stopping the unit would take servers from under mounted file systems.
_ALONE = {"KillMode": "process"}
_OUTLIVES = {"Type": "oneshot", "RemainAfterExit": "yes"}


@pytest.mark.parametrize(
    ("unit", "section", "settings"),
    [
        # systemd would forget what it stores, and readers would wait for nobody.
        (DAEMON_UNIT, "Unit", {"StartLimitIntervalSec": "0"}),
        (
            *(DAEMON_UNIT, "Service"),
            {"Type": "notify", "Restart": "on-failure", "TasksMax": "infinity"}
            | (_IN_MEMORY | _ALONE),
        ),
        (UNIT, "Service", _IN_MEMORY | _ALONE | _OUTLIVES),
        (VOLUME_UNIT, "Service", _IN_MEMORY | _ALONE | _OUTLIVES),
        # containerd tries after a second; if that is too early, up to two s later.
        (SNAPSHOTTER_UNIT, "Unit", {"StartLimitIntervalSec": "0"}),
        (
            *(SNAPSHOTTER_UNIT, "Service"),
            # It ends with 143 by SIGTERM, which is no failure.
            {"Type": "notify", "SuccessExitStatus": "143", "Restart": "on-failure"}
            | {"RestartSec": "100ms", "RestartPreventExitStatus": "2 3", **_ALONE},
        ),
        (SOCKET_UNIT, "Socket", {"SocketMode": "0600", "DirectoryMode": "0700"}),
    ],
    ids=lambda value: getattr(value, "stem", ""),
)
def test_what_must_not_change(
    unit: Path, section: str, settings: dict[str, str]
) -> None:
    assert settings.items() <= dict(_sections(unit)[section]).items()


def _sections(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    return unit
