"""A library that is missing is named, with what to install: no raw word of a loader."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from btrfs_ublk.base.helpers import (
    CHECKSEED,
    HELPERS_VARIABLE,
    MKSEED,
    SERVER,
    helper_path,
)
from btrfs_ublk.device import DeviceOptions, add_device, list_devices
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.server import BlockServer, Description, PatternSegment
from btrfs_ublk.units import MIB


@pytest.fixture
def of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two helpers that need a version of a library that nobody has; another not."""
    for name in (MKSEED, SERVER, CHECKSEED):
        shutil.copy(helper_path(name), tmp_path)
        if name != CHECKSEED:
            program = (tmp_path / name).read_bytes()
            assert program.count(b"\0libjansson.so.4\0") == 1
            other = program.replace(b"\0libjansson.so.4\0", b"\0libjansson.so.7\0")
            (tmp_path / name).write_bytes(other)
    monkeypatch.setenv(HELPERS_VARIABLE, str(tmp_path))


@pytest.mark.usefixtures("of_another_machine")
def test_a_server_says_what_to_install() -> None:
    description = Description(MIB, [PatternSegment(offset=0, length=MIB)])
    with pytest.raises(CapabilityError, match=f"{SERVER} needs the library libjansson"):
        with BlockServer(description, front_end="fuse"):
            pass
    with pytest.raises(CapabilityError, match=f"{SERVER} needs the library libjansson"):
        add_device("none", description, DeviceOptions(front_end="fuse"))
    assert not list_devices()
