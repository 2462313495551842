"""A library that is missing is named, with what to install: no raw word of a loader."""

from __future__ import annotations

import pytest
from support import needs

from btrfs_ublk.base.helpers import (
    SERVER,
)
from btrfs_ublk.device import DeviceOptions, add_device, list_devices
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.server import BlockServer, Description, PatternSegment
from btrfs_ublk.units import MIB

of_another_machine = needs.of_another_machine  # a fixture


@pytest.mark.usefixtures("of_another_machine")
def test_a_server_says_what_to_install() -> None:
    description = Description(MIB, [PatternSegment(offset=0, length=MIB)])
    with pytest.raises(CapabilityError, match=f"{SERVER} needs the library libjansson"):
        with BlockServer(description, front_end="fuse"):
            pass
    with pytest.raises(CapabilityError, match=f"{SERVER} needs the library libjansson"):
        add_device("none", description, DeviceOptions(front_end="fuse"))
    assert not list_devices()
