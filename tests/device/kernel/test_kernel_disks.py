"""zram devices, and modules that are loaded for a while."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.needs import Need, inapplicable

from btrfs_ublk.base.gc import collect
from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.bench.resources.kernel_module import LoadableModule, loaded_module
from btrfs_ublk.bench.resources.zram import ZRAM, ZRAM_CONTROL, zram_device
from btrfs_ublk.errors import CommandError, LeftoverError, UsageError
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


@pytest.mark.thorough
class TestZram:
    @pytest.fixture(autouse=True)
    def _needs(self, need: Need) -> None:
        need(ZRAM)
        if not ZRAM_CONTROL.exists():
            inapplicable("zram is a module here: see the tests in the VM")

    def test_it_is_new_and_goes(self) -> None:
        before = set(Path("/sys/block").glob("zram*"))
        with zram_device(16 * MIB) as path:
            assert blockdev.size_bytes(path) == 16 * MIB
            assert Path("/sys/block", path.name) not in before
            path.write_bytes(b"x" * 4096)
            assert read_direct(path, 0, 4096) == b"x" * 4096
        assert set(Path("/sys/block").glob("zram*")) == before

    def test_in_use_it_stays(self) -> None:
        with zram_device(16 * MIB) as path:
            (entry,) = [x for x in process_ledger().entries() if x.kind == "zram"]
            fd = os.open(path, os.O_RDONLY | os.O_EXCL)
            with pytest.raises(LeftoverError, match="in use"):
                process_ledger().undo(entry)
            os.close(fd)
            assert path.exists()

    def test_gc_removes_what_a_killed_process_left(self) -> None:
        (name,) = killed(
            "import time; from btrfs_ublk.bench.resources.zram import zram_device\n"
            "with zram_device(1 << 24) as path:\n"
            "    print(path.name, flush=True); time.sleep(60)"
        )
        assert Path("/sys/block", name).exists()
        assert collect().is_clean
        assert not Path("/sys/block", name).exists()


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
