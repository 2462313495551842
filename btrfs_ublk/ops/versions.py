"""The versions in use: of the package, its C helpers, and what they need."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import btrfs_ublk
from btrfs_ublk.base.helpers import HELPERS, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import CapabilityError, CommandError

_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Versions:
    """``helpers`` have None if one is not built or gives no version; ``btrfs_progs`` is
    None if it is not installed.
    """

    btrfs_ublk: str
    helpers: dict[str, str | None]
    kernel: str
    btrfs_progs: str | None
    python: str

    @property
    def other_helpers(self) -> dict[str, str | None]:
        """The helpers that are not of the package's version."""
        return {
            name: version
            for name, version in self.helpers.items()
            if version != self.btrfs_ublk
        }

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"helpers_match": not self.other_helpers}


def find_versions() -> Versions:
    """Find all versions; runs each helper once, which is quick."""
    progs = _last_word("btrfs", "--version")
    return Versions(
        btrfs_ublk=btrfs_ublk.__version__,
        helpers={name: _helper_version(name) for name in HELPERS},
        kernel=platform.release(),
        btrfs_progs=progs.removeprefix("v") if progs else None,
        python=platform.python_version(),
    )


def _helper_version(name: str) -> str | None:
    try:
        return _last_word(str(helper_path(name)), "--version")
    except CapabilityError:
        return None


def first_line(*argv: str) -> str | None:
    """Return the first line that a command prints; None if it cannot be run."""
    try:
        return run(argv, timeout_s=_TIMEOUT_S).stdout.strip().partition("\n")[0]
    except CommandError:
        return None


def _last_word(*argv: str) -> str | None:
    return (first_line(*argv) or "").rpartition(" ")[2] or None
