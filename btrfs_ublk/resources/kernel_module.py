"""Kernel modules that are loaded for a while, with parameters of ours."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from btrfs_ublk.capabilities import ROOT, require
from btrfs_ublk.errors import LeftoverError, UsageError
from btrfs_ublk.ledger import Entry, Ledger, process_ledger, remover
from btrfs_ublk.process import run

_KIND = "kernel-module"
_TIMEOUT_S = 30.0


@contextmanager
def loaded_module(
    name: str, parameters: Mapping[str, object], *, ledger: Ledger | None = None
) -> Iterator[None]:
    """Load a module, and unload it when the block is left.

    Raises UsageError when it is loaded already, as its devices may be somebody's, and
    CommandError, with what modprobe(8) says.
    """
    require(ROOT)
    ledger = ledger or process_ledger()
    if _directory(name).exists():
        raise UsageError(
            f"the module {name} is loaded already: its devices may be somebody's",
            hint=f"if nobody needs them: modprobe --remove {name}",
        )
    with ledger.holding(_KIND, name=name) as entry:
        words = [f"{key}={value}" for key, value in parameters.items()]
        # The lock goes along: were we killed now, gc would wait for modprobe(8).
        run(
            ["modprobe", name, *words],
            timeout_s=_TIMEOUT_S,
            keep_open_fds=[ledger.fileno()],
        )
        ledger.amend(entry, inode=_directory(name).stat().st_ino)
        yield


def _directory(name: str) -> Path:
    return Path("/sys/module") / name


@remover(_KIND)
def _unload(entry: Entry) -> bool:
    name, inode = entry.details["name"], entry.details.get("inode")
    with suppress(FileNotFoundError):
        # Of sysfs, where no later directory gets the number again.
        found = os.stat(_directory(name)).st_ino
        if inode is None:
            raise LeftoverError(
                f"the module {name} is loaded; perhaps by somebody else",
                hint=f"modprobe --remove {name}",
            )
        if found == inode:
            run(["modprobe", "--remove", name], timeout_s=_TIMEOUT_S)
            return True
    return False
