"""Tests in this folder make devices: they need root, btrfs, loop devices and FUSE.

Those with the parameter `ublk` need that driver, and run in a VM where the kernel has
none. `scripts/test` runs several at a time, each worker with mounts of its own.
"""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import support.devices
from click.testing import CliRunner
from support.needs import Need
from support.volumes import Place

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.log import log
from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE
from btrfs_ublk.cli.main import command
from btrfs_ublk.volume.store import VOLUMES_VARIABLE

#: Those that a command ignores at its end.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("device")


class _Command:
    """``btrfs-ublk``, as click's runner wants it."""

    name = "btrfs-ublk"

    def main(self, args: Sequence[str], **_: object) -> None:
        level = log.level
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [self.name, *args])
            patch.setattr(log, "handlers", [])
            patch.setattr(log, "propagate", False)
            try:
                run_command(command, name=self.name)
            finally:
                log.setLevel(level)
                for number, handler in handlers.items():
                    signal.signal(number, handler)


def _run(
    *words: object, stdin: str = "", timeout_s: float = 0
) -> subprocess.CompletedProcess[str]:
    argv = [str(word) for word in words]
    done = CliRunner().invoke(_Command(), argv, input=stdin)  # type: ignore[arg-type]
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(argv, done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def in_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the test run commands in its own process: another one takes half a second of
    a CPU to start. What they print, and their exit status, is the same."""
    nouns = {"device_command": ["device"], "map_command": ["map"], "any_command": []}
    for name, noun in nouns.items():
        for module in (request.module, support.devices):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, functools.partial(_run, *noun))
    another_process = Place.command

    def of_place(
        place: Place,
        *arguments: object,
        before: Sequence[str] = (),
        noun: str = "volume",
        verbose: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        if before:
            return another_process(place, *arguments, before=before, noun=noun)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(os.environ, VOLUMES_VARIABLE, str(place.base))
            return _run(*["-vv"] * verbose, noun, *arguments)

    monkeypatch.setattr(Place, "command", of_place)


@pytest.fixture
def place(
    need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """For volumes with the fuse front end. Files with other needs have their own."""
    need(ROOT, BTRFS, LOOP, FUSE)
    monkeypatch.setenv(CONFIG_VARIABLE, str(sparse_path / "etc"))
    found = Place(sparse_path, "fuse")
    yield found
    found.take_all_down()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is said of those who use a volume, who never go by themselves:
    to look for them again and again takes a whole CPU."""
    monkeypatch.setattr("btrfs_ublk.volume.down._OPEN_TIMEOUT_S", 0.5)
    monkeypatch.setattr("btrfs_ublk.kernel.mount._BUSY_TIMEOUT_S", 0.5)
    monkeypatch.setattr("btrfs_ublk.kernel.loop._DETACH_TIMEOUT_S", 0.5)
