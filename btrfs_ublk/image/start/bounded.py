"""Deriving a start in a process that may not take all memory or run for ever: a layer
of a stranger can have anything in it."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from btrfs_ublk.base.log import log
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import CommandError
from btrfs_ublk.image.start.programs import Range, command_ranges
from btrfs_ublk.units import GIB

_TIMEOUT_S = 300.0
_MEMORY_BYTES = 2 * GIB


def bounded_ranges(
    layers: Sequence[Path],
    config: Mapping[str, Any],
    work: Path,
    *,
    timeout_s: float = _TIMEOUT_S,
) -> list[Range]:
    """Return what command_ranges() does; nothing, with a warning, if that takes more
    than ``timeout_s`` seconds or 2 GiB of memory, or fails."""
    request = json.dumps([[str(each) for each in layers], config, str(work)])
    try:
        done = run(
            [sys.executable, "-P", "-m", __name__], timeout_s=timeout_s, input=request
        )
    except CommandError as error:
        log.warning("no data come first: looking at the command failed: %s", error)
        return []
    return [Range(*each) for each in json.loads(done.stdout)]


def _answer() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    layers, config, work = json.load(sys.stdin)
    found = command_ranges([Path(each) for each in layers], config, Path(work))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    _answer()
