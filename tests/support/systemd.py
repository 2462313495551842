"""The units, installed below a root."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from support.paths import PROJECT

from btrfs_ublk.base.process import run

_OPERATING = PROJECT / "docs/how-to/operating.md"

_INSTALLED = "/etc/systemd/system"

_RELOAD = "systemctl daemon-reload\n"

COMMAND = Path(sys.executable).with_name("btrfs-ublk")


def install_units(directory: Path) -> None:
    """Install the units as the document has it."""
    (recipe,) = re.findall(r"^```sh\n(.*?)^```", _OPERATING.read_text(), re.M | re.S)
    assert _INSTALLED in recipe and recipe.endswith(_RELOAD)
    recipe = recipe.replace(_INSTALLED, str(directory)).replace(_RELOAD, "true\n")
    path = f"{COMMAND.parent}:{os.environ['PATH']}"
    run(["sh", "-euc", recipe], timeout_s=60, env=os.environ | {"PATH": path})
