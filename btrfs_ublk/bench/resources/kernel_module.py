"""Kernel modules that are loaded temporarily, with our parameters."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.capabilities import ROOT, require
from btrfs_ublk.base.ledger import Entry, Ledger, process_ledger, remover
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import CommandError, LeftoverError, UsageError

_KIND = "kernel-module"
_TIMEOUT_S = 30.0


#: scripts/vm sets it to "1": what is loaded or broken there is gone with the guest.
IN_VM_VARIABLE = "BTRFS_UBLK_IN_VM"


@dataclass(frozen=True)
class LoadableModule:
    """A kernel module that may be loaded temporarily, with our parameters: only in the
    VM, and only if it is not already loaded.
    """

    module: str

    @property
    def name(self) -> str:
        return f"the module {self.module}"

    @property
    def hint(self) -> str:
        return "run this in a VM: scripts/vm"

    def probe(self) -> str | None:
        if Path("/sys/module", self.module).exists():
            return "it is there already, and its devices may be somebody's"
        if os.environ.get(IN_VM_VARIABLE) != "1":
            return "modules are loaded in the VM of scripts/vm only"
        try:
            run(["modprobe", "--dry-run", self.module], timeout_s=_TIMEOUT_S)
        except CommandError as error:
            return error.message.splitlines()[-1].strip()
        return None


@contextmanager
def loaded_module(
    name: str, parameters: Mapping[str, object], *, ledger: Ledger | None = None
) -> Iterator[None]:
    """Load a module, and unload it at the end of the block.

    Raises UsageError when it is loaded already, as its devices may be somebody's, and
    CommandError, with modprobe(8)'s message.
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
        # It inherits the lock: if we are killed now, gc waits for modprobe(8).
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
        # sysfs never reuses the inode number for a later directory.
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
