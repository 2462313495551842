"""No recovery loses what was written to a volume, also what is not synced yet: closed
files, which nobody has open, above all.
"""

import hashlib
import mmap
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices import is_whole, kill_those, wait_for
from support.needs import Need
from support.processes import looking_at_all_devices
from support.volumes import NAME, Place

from btrfs_ublk.base.capabilities import FUSE, UBLK
from btrfs_ublk.base.process import run
from btrfs_ublk.device import recover_device, show_device
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError
from btrfs_ublk.kernel import loop_device, mounted
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume import down_volume, show_volume, up_volume

pytestmark = [pytest.mark.data, pytest.mark.timeout(600)]
ALL = ("server", "supervisor", "keeper")


@pytest.fixture
def place(need: Need, front_end: FrontEndName, sparse_path: Path) -> Iterator[Place]:
    need(UBLK if front_end == "ublk" else FUSE)
    found = Place(sparse_path, front_end)
    up_volume(NAME, found.definition("one"), base=found.base)
    yield found
    found.take_all_down()


class Shadow:
    """What was written below a directory, and has to be there."""

    def __init__(self, directory: Path, *, seed: int) -> None:
        self._directory = directory
        self._chances = random.Random(seed)
        self._expected: dict[str, bytes] = {}
        directory.mkdir()

    def write(self) -> None:
        """Files of each kind; nothing is synced, and all are closed."""
        chances = self._chances
        for number in range(300):
            self._file(f"small-{number}", chances.randrange(1, 6000))
        for number in range(3):
            self._file(f"large-{number}", chances.randrange(MIB, 3 * MIB))
        self._file("longer", MIB)
        with (self._directory / "longer").open("r+b") as file:
            file.truncate(300 * KIB + 5)
        self._expected["longer"] = self._expected["longer"][: 300 * KIB + 5]
        self._file("before", 70000)
        self._file("replaced", 500)
        os.rename(self._directory / "before", self._directory / "replaced")
        self._expected["replaced"] = self._expected.pop("before")
        self._file("mapped", MIB)
        run(["sync", "-f", self._directory], timeout_s=60)
        with (self._directory / "mapped").open("r+b") as file:
            with mmap.mmap(file.fileno(), 0) as mapped:
                data = chances.randbytes(400 * KIB)
                mapped[100 : 100 + len(data)] = data
        content = bytearray(self._expected["mapped"])
        content[100 : 100 + len(data)] = data
        self._expected["mapped"] = bytes(content)
        self._file("after", 100000)  # since the sync
        for number in range(300, 350):
            self._file(f"small-{number}", chances.randrange(1, 6000))

    def _file(self, name: str, length: int) -> None:
        content = self._chances.randbytes(length)
        (self._directory / name).write_bytes(content)
        self._expected[name] = content

    def check(self, directory: Path | None = None) -> None:
        directory = directory or self._directory
        assert sorted(os.listdir(directory)) == sorted(self._expected)
        for name, expected in self._expected.items():
            found = (directory / name).read_bytes()
            assert len(found) == len(expected), name
            assert hashlib.sha256(found).digest() == hashlib.sha256(expected).digest()


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("3")


def check_after_all(place: Place, shadow: Shadow) -> None:
    """In memory, on the disk, after a clean unmount, and as btrfs-progs see it."""
    shadow.check()
    run(["sync", "-f", place.target], timeout_s=60)
    drop_caches()
    shadow.check()
    down_volume(NAME, base=place.base)
    check_file_system(place)
    up_volume(NAME, place.definition("one"), base=place.base)
    shadow.check()
    assert place.matches("one")


def check_file_system(place: Place) -> None:
    volume = place.base / NAME
    with loop_device(volume / "seed.img", read_only=True) as seed:
        with loop_device(volume / "sprout.img", read_only=True) as grown:
            run(["btrfs", "device", "scan", seed.path, grown.path], timeout_s=60)
            try:
                with looking_at_all_devices():
                    run(["btrfs", "check", "--readonly", grown.path], timeout_s=120)
            finally:
                for device in (seed.path, grown.path):
                    run(["btrfs", "device", "scan", "-u", device], timeout_s=60)


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param([("server", "supervisor")], marks=pytest.mark.gate_ublk),
        [("server",), ("server", "keeper")],
    ],
    ids=["server+supervisor", "server, server+keeper"],
)
def test_what_is_written_survives(place: Place, turns: list[tuple[str, ...]]) -> None:
    shadows = []
    for number, who in enumerate(turns):
        shadows.append(Shadow(place.target / f"written-{number}", seed=number))
        shadows[-1].write()
        drop_caches()
        kill_those_of_volume(who)
    for shadow in shadows[:-1]:
        shadow.check()
    check_after_all(place, shadows[-1])


def kill_those_of_volume(who: tuple[str, ...]) -> None:
    kill_those(who, name=NAME)
    if who != ALL:
        wait_for(NAME, is_whole)


@pytest.mark.fuse
@pytest.mark.parametrize("front_end", ["fuse"], indirect=True)
class TestAllAreKilled:
    """The FUSE connection is over, and nothing is done under a mount."""

    def test_nothing_is_lost(self, place: Place) -> None:
        shadow = Shadow(place.target / "written", seed=5)
        shadow.write()
        device = show_device(NAME).path
        kill_those_of_volume(ALL)
        shown = show_device(NAME)
        assert shown.health == "lost" and "unmount it" in str(shown.reason)
        for _ in range(2):
            with pytest.raises(BtrfsUblkError, match=f"mounted at {place.target}"):
                recover_device(NAME)
        assert "unmount it" in str(show_device(NAME).reason)
        with pytest.raises(LeftoverError, match=f"mounted at {place.target}"):
            up_volume(NAME, place.definition("one"), base=place.base)
        status = show_volume(NAME, base=place.base)
        assert status.state == "broken" and "unmount it" in str(status.reason)
        assert show_device(NAME).path == device
        shadow.check()
        # No sync before: the unmount writes what is dirty.
        run(["umount", place.target], timeout_s=60)
        up_volume(NAME, place.definition("one"), base=place.base)
        shadow.check()
        check_after_all(place, shadow)

    def test_metadata_of_the_seed_are_wanted(self, place: Place) -> None:
        """They are not in memory any more; what is written is on the sprout."""
        shadow = Shadow(place.target / "written", seed=6)
        shadow.write()
        kill_those_of_volume(ALL)
        drop_caches()
        subprocess.run(["ls", "-lR", place.target], capture_output=True, timeout=60)
        run(["umount", place.target], timeout_s=60)
        up_volume(NAME, place.definition("one"), base=place.base)
        check_after_all(place, shadow)

    def test_an_administrator_aborts_the_connection(
        self, place: Place, tmp_path: Path
    ) -> None:
        shadow = Shadow(place.target / "written", seed=7)
        shadow.write()
        file = device_directory(NAME).state().ready["file"]
        number = os.minor(os.stat(file).st_dev)
        with mounted("none", tmp_path, fs_type="fusectl"):
            (tmp_path / str(number) / "abort").write_text("1")
        state = wait_for(NAME, lambda state: state.status == "lost")
        assert "in use" in str(state.reason)
        assert state.supervisor is None or state.supervisor.wait(timeout_s=10)
        assert all(each.process.wait(timeout_s=10) for each in state.keepers)
        shadow.check()
        run(["umount", place.target], timeout_s=60)
        assert recover_device(NAME)
        up_volume(NAME, place.definition("one"), base=place.base)
        check_after_all(place, shadow)

    def test_who_has_it_open_is_named(self, place: Place) -> None:
        down_volume(NAME, base=place.base)
        up_volume(NAME, place.definition("one"), base=place.base)
        device = show_device(NAME).path
        assert device is not None
        run(["umount", place.target], timeout_s=60)
        with open(device, "rb"):
            kill_those_of_volume(ALL)
            with pytest.raises(BtrfsUblkError, match=f"process {os.getpid()} "):
                recover_device(NAME)
        assert recover_device(NAME)
        up_volume(NAME, place.definition("one"), base=place.base)
        assert place.matches("one")
