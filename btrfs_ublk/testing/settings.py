"""The plugin's settings: command line options, and ini settings."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from btrfs_ublk.server import FrontEndName

FRONT_ENDS = ("auto", "ublk", "fuse")
_TIMEOUT_S = 30.0
#: The value "1" has the effect of the option --btrfs-ublk-require.
REQUIRE_VARIABLE = "BTRFS_UBLK_REQUIRE"


@dataclass(frozen=True)
class Settings:
    """``images``: the directory for all files; None: $TMPDIR, or /tmp. ``timeout_s``:
    how long a server may take to be ready.
    """

    front_end: FrontEndName
    images: Path | None
    timeout_s: float
    require: bool


_KEY = pytest.StashKey[Settings]()

#: Name, placeholder of the value, help.
_TEXTS = (
    (
        "front-end",
        "NAME",
        "what serves devices: ublk, fuse, or auto (default): ublk where the kernel has "
        "it, and survives the death of its server",
    ),
    (
        "images",
        "DIR",
        "where seeds, writable devices and caches are made (default: $TMPDIR, or /tmp)",
    ),
    (
        "timeout",
        "SECONDS",
        f"how long a server may take to be ready (default: {_TIMEOUT_S:g})",
    ),
)
_REQUIRE = (
    "fail tests that would be skipped because this machine lacks a capability (also: "
    f"{REQUIRE_VARIABLE}=1)"
)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("btrfs-ublk", "lazy btrfs volumes (btrfs-ublk)")
    for name, metavar, text in _TEXTS:
        group.addoption(_option(name), metavar=metavar, default=None, help=text)
        parser.addini(_ini(name), text, default=None)
    group.addoption(
        _option("require"), action="store_true", default=None, help=_REQUIRE
    )
    parser.addini(_ini("require"), _REQUIRE, type="bool", default=False)


def read(config: pytest.Config) -> None:
    """Read and check the settings, before any test runs. Raises pytest.UsageError."""
    front_end = _chosen(config, "front-end", "auto")
    if front_end not in FRONT_ENDS:
        raise _wrong("front-end", front_end, f"one of {', '.join(FRONT_ENDS)}")
    images = _chosen(config, "images", None)
    if images is not None and not (config.rootpath / images).is_dir():
        raise _wrong("images", images, "a directory")
    timeout = _chosen(config, "timeout", _TIMEOUT_S)
    try:
        timeout_s = float(timeout)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise _wrong("timeout", timeout, "a number of seconds above 0")
    require = os.environ.get(REQUIRE_VARIABLE) == "1"
    config.stash[_KEY] = Settings(
        front_end=front_end,
        images=None if images is None else config.rootpath / images,
        timeout_s=timeout_s,
        require=bool(_chosen(config, "require", False)) or require,
    )


def settings_of(config: pytest.Config) -> Settings:
    return config.stash[_KEY]


def _option(name: str) -> str:
    return f"--btrfs-ublk-{name}"


def _ini(name: str) -> str:
    return f"btrfs_ublk_{name.replace('-', '_')}"


def _chosen(config: pytest.Config, name: str, default: Any) -> Any:
    """Return the option, else the ini setting, else the default. NB: pytest before 8
    returns "" for an ini setting that is not given, whatever its default.
    """
    for value in (config.getoption(_option(name)), config.getini(_ini(name))):
        if value is not None and value != "":
            return value
    return default


def _wrong(name: str, value: object, wanted: str) -> pytest.UsageError:
    return pytest.UsageError(
        f"{_option(name)} (or {_ini(name)}) is {str(value)!r}, it must be {wanted}"
    )
