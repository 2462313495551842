"""Modules that are loaded for a while."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.needs import Need

from btrfs_ublk.base.gc import collect
from btrfs_ublk.bench.resources.kernel_module import LoadableModule, loaded_module
from btrfs_ublk.errors import CommandError, UsageError
from btrfs_ublk.kernel import blockdev
from btrfs_ublk.units import MIB


def killed(code: str) -> list[str]:
    """The first words that a process prints, which is killed then."""
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        words = victim.stdout.readline().split()
        victim.kill()
    assert words
    return words


@pytest.mark.ublk
class TestModule:
    MODULE = "brd"

    @pytest.fixture(autouse=True)
    def _needs(self, need: Need) -> None:
        need(LoadableModule(self.MODULE))

    def test_it_is_loaded_with_parameters_and_goes(self) -> None:
        with loaded_module(self.MODULE, {"rd_nr": 2, "rd_size": 4096}):
            assert blockdev.size_bytes(Path("/dev/ram1")) == 4 * MIB
            reason = LoadableModule(self.MODULE).probe()
            assert reason is not None and "already" in reason
            with pytest.raises(UsageError, match="already"):
                with loaded_module(self.MODULE, {}):
                    pass
            assert Path("/dev/ram1").exists()
        assert not Path("/sys/module", self.MODULE).exists()

    def test_wrong_parameters(self) -> None:
        with pytest.raises(CommandError, match="brd"):
            with loaded_module(self.MODULE, {"rd_nr": "many"}):
                pass

    def test_gc_unloads_it(self) -> None:
        killed(
            "import time\n"
            "from btrfs_ublk.bench.resources.kernel_module import loaded_module\n"
            "with loaded_module('brd', {'rd_nr': 1}):\n"
            "    print('there', flush=True); time.sleep(60)"
        )
        assert Path("/dev/ram0").exists()
        assert collect().is_clean
        assert not Path("/sys/module", self.MODULE).exists()


def test_modules_are_loaded_in_the_vm_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BTRFS_UBLK_IN_VM", raising=False)
    reason = LoadableModule("no-such-module").probe()
    assert reason is not None and "VM" in reason
