"""Kernel modules that are loaded temporarily, with our parameters."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.base.capabilities import ROOT, require
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import CommandError

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
def loaded_module(name: str, parameters: Mapping[str, object]) -> Iterator[None]:
    """Load a module that probe() allows, and unload it at the end of the block. The
    guest of a killed benchmark keeps it, until the guest is gone.

    Raises CommandError, with modprobe(8)'s message.
    """
    require(ROOT)
    words = [f"{key}={value}" for key, value in parameters.items()]
    run(["modprobe", name, *words], timeout_s=_TIMEOUT_S)
    try:
        yield
    finally:
        run(["modprobe", "--remove", name], timeout_s=_TIMEOUT_S)
