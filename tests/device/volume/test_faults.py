"""Every step of bringing a volume up fails, is interrupted, or is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from support.paths import TESTS
from support.system_state import SystemState
from support.volumes import NAME, TIMEOUT_S, Place, killed_at

from btrfs_ublk.base.process import run
from btrfs_ublk.content.cache import Cache
from btrfs_ublk.device import list_devices, remove_device
from btrfs_ublk.device.locks import registry_locked
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.units import MIB
from btrfs_ublk.volume import (
    VolumeFile,
    down_volume,
    remove_volume,
    show_volume,
    up_volume,
)
from btrfs_ublk.volume.store import remove_halves, volumes_directory

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("in_process")]

#: What is called when so much has been done, in this order: module and function.
STEPS = [
    ("seed", "make_seed"),
    ("volume.store", "sync"),
    ("volume.up", "make_private"),
    ("device", "add_device"),
    ("volume.up", "sync"),
    ("volume.up", "sprout"),
    ("volume.sprout", "loop_device"),
    ("volume.sprout", "mounted"),
    ("volume.up", "assert_mapping"),
    ("volume.sprout", "add_device"),
    ("volume.sprout", "filesystem_uuid"),
    ("volume.up", "commit_transaction"),
    ("volume.up", "apply_read_ahead"),
    ("device", "device_map"),
    ("volume.files", "opened_top"),
    ("volume.files", "clone_in_directory"),
    ("volume.files", "commit_transaction"),
]


@pytest.fixture
def place(sparse_path: Path) -> Iterator[Place]:
    found = Place(sparse_path, "fuse")
    # What stays once there was a volume.
    with registry_locked(volumes_directory(found.base, make=True)):
        found.content("one")
    yield found
    found.take_all_down()


def parts(place: Place, state: SystemState) -> tuple[object, ...]:
    """What a volume may leave; but not other tests' loop devices."""
    ours = (state.mounts, state.children, state.files, state.ledger_entries)
    return *ours, loops_below(place.root), list_devices()


def fail(*_: object, **__: object) -> None:
    raise BtrfsUblkError("injected")


def interrupt(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGINT)
    raise BtrfsUblkError("injected")  # where signals are deferred


some_steps = pytest.mark.parametrize(
    "steps",
    [
        STEPS[1::4],
        *(pytest.param(STEPS[x::4], marks=pytest.mark.thorough) for x in (0, 2, 3)),
    ],
    ids=["some", "others", "more", "rest"],
)


@some_steps
def test_a_step_fails(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    state_of_system: Callable[[], SystemState],
    steps: list[tuple[str, str]],
) -> None:
    """A new volume leaves nothing."""
    before = parts(place, state_of_system())
    for number, (module, function) in enumerate(steps):
        fault = (fail, interrupt)[number % 2]
        with monkeypatch.context() as patch:
            patch.setattr(import_module(f"btrfs_ublk.{module}"), function, fault)
            with pytest.raises((BtrfsUblkError, KeyboardInterrupt)) as raised:
                up_volume(NAME, place.definition("one"), base=place.base)
        assert not getattr(raised.value, "__notes__", None), (function, raised.value)
        assert parts(place, state_of_system()) == before, function
    assert up_volume(NAME, place.definition("one"), base=place.base).is_up
    assert place.matches("one")
    down_volume(NAME, base=place.base)
    # One that was there is as it was.
    with monkeypatch.context() as patch:
        files = import_module("btrfs_ublk.volume.files")
        patch.setattr(files, "clone_in_directory", interrupt)
        with pytest.raises(KeyboardInterrupt):
            up_volume(NAME, place.definition("one", "two"), base=place.base)
    assert place.state() == "down"
    assert up_volume(NAME, place.definition("one", "two"), base=place.base).is_up
    assert place.matches("one") and place.matches("two")
    down_volume(NAME, base=place.base)
    remove_volume(NAME, base=place.base)


@some_steps
def test_killed_at_a_step(
    place: Place,
    state_of_system: Callable[[], SystemState],
    steps: list[tuple[str, str]],
) -> None:
    """The next command puts all in order: up makes it whole, down leaves nothing."""
    before = parts(place, state_of_system())
    definition = place.definition("one")
    for number, step in enumerate(steps[1::2]):
        _kill_at(place, *step)
        if number % 2 == 0:
            assert up_volume(NAME, definition, base=place.base).is_up, step
            assert place.matches("one"), step
        if place.command("down", NAME).returncode == 0:
            remove_volume(NAME, base=place.base)
        else:
            # It was not there as a whole; the next one takes its rest away.
            up_volume(NAME, definition, base=place.base)
            down_volume(NAME, base=place.base)
            remove_volume(NAME, base=place.base)
        assert parts(place, state_of_system()) == before, step


def _kill_at(place: Place, module: str, function: str) -> None:
    killed_at(
        f"{module}:{function}",
        f"sys.path.insert(0, '{TESTS}')\n"
        "from support.volumes import NAME, Place\n"
        f"place = Place({place.root!r}, 'fuse')\n"
        "volume.up_volume(NAME, place.definition('one'), base=place.base)",
    )


#: Brings a volume up, and fails, or is killed, when so many files have appeared.
_MANY = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from support.volumes import NAME
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.volume import files, read_definition, up_volume

end, count, made, real = sys.argv[1], int(sys.argv[2]), [], files.clone_in_directory

def clone(*arguments, **options):
    made.append(1)
    if len(made) > count and end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if len(made) > count:
        raise BtrfsUblkError("injected")
    real(*arguments, **options)

files.clone_in_directory = clone
root = Path(sys.argv[3])
up_volume(NAME, read_definition(root / "many.toml"), base=root / "volumes")
"""


@pytest.mark.parametrize("end", ["kill", "fail"])
def test_many_files_are_all_there_or_a_repeat_completes_them(
    place: Place, end: str
) -> None:
    content = place.content("one").read_bytes()
    files = [
        VolumeFile(f"d{number % 7}/e/{number}", {"kind": "file", "path": str(path)})
        for path in (place.content("one"),)
        for number in range(100)
    ]
    definition = place.definition(files=(*files, VolumeFile("empty", {"size": 0})))
    (place.root / "many.toml").write_text(definition.to_toml())
    up_volume(NAME, place.definition(), base=place.base)
    words = [sys.executable, "-c", _MANY, end, "61", place.root, TESTS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    there = [path for path in place.target.rglob("*") if path.is_file()]
    if end == "kill":
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert len(there) == 61 and {x.read_bytes() for x in there} <= {content, b""}
    else:
        assert "injected" in done.stderr and not list(place.target.iterdir())
    assert show_volume(NAME, base=place.base).files == []
    assert up_volume(NAME, definition, base=place.base).file_count == 101
    assert (place.target / "empty").read_bytes() == b""
    assert all((place.target / x.path).read_bytes() == content for x in files)


@pytest.mark.usefixtures("short_waits")
def test_what_cannot_be_taken_down_is_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new volume that somebody uses when its making fails: down ends it later."""
    users = []

    def use_and_fail(target: Path, *_: object) -> None:
        users.append(os.open(target, os.O_RDONLY))
        fail()

    with monkeypatch.context() as patch:
        module = import_module("btrfs_ublk.volume.up")
        patch.setattr(module, "apply_read_ahead", use_and_fail)
        with pytest.raises(BtrfsUblkError, match="injected") as raised:
            up_volume(NAME, place.definition("one"), base=place.base)
    assert any("busy" in note for note in raised.value.__notes__)
    assert place.state() == "up"  # mounted and served, if without its files
    with pytest.raises(BtrfsUblkError):
        remove_volume(NAME, base=place.base)
    os.close(users[0])
    assert down_volume(NAME, base=place.base)
    assert up_volume(NAME, place.definition("one"), base=place.base).is_up
    assert place.matches("one")
    down_volume(NAME, base=place.base)


def test_nobody_waits_for_a_removal(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as long as its cache is large, and another one may do a part of it."""
    up_volume(NAME, place.definition("one"), base=place.base)
    assert place.matches("one")
    down_volume(NAME, base=place.base)
    removed = []

    def remove(path: Path, **options: bool) -> None:
        with registry_locked(place.base):  # as anybody could
            pass
        remove_halves(place.base)  # which leaves alone what we have
        rmtree(path, **options)
        removed.append(path.name)
        raise FileNotFoundError(path)

    rmtree = shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove)
        remove_volume(NAME, base=place.base)
    assert removed[0] == "cache" and removed[1].startswith(f".{NAME}.")
    dead = place.base / f".{NAME}.0123456789abcdef"
    (dead / "cache").mkdir(parents=True)
    remove_halves(place.base)
    assert [path.name for path in place.base.iterdir()] == [".lock"]


def test_a_cache_that_was_made_for_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone, but for one that was there, or has contents."""
    cache = place.root / "caches/c4"
    definition = place.definition("one", cache=cache, cache_max_bytes=MIB)

    def read_and_fail(data: int, *_: object, source_offset: int, **__: int) -> None:
        found = os.pread(data, 5000, source_offset)
        assert found == place.content("one").read_bytes()[:5000]
        fail()

    def up(fault: Callable[..., None]) -> None:
        module = import_module("btrfs_ublk.volume.files")
        with monkeypatch.context() as patch:
            patch.setattr(module, "clone_in_directory", fault)
            with pytest.raises(BtrfsUblkError, match="injected") as raised:
                up_volume(NAME, definition, base=place.base)
        assert not getattr(raised.value, "__notes__", None)

    up(fail)
    assert not cache.parent.exists()
    cache.mkdir(mode=0o700, parents=True)
    Cache(cache).limit(max_bytes=7 * MIB, reserve_bytes=0)
    up(fail)
    # Somebody else's cap is as it was.
    assert json.loads((cache / "limits").read_text())["max_bytes"] == 7 * MIB
    shutil.rmtree(cache)
    up(read_and_fail)
    assert len(list(cache.glob("*.data"))) == 1


def test_a_directory_that_was_removed_while_it_was_up(place: Place) -> None:
    """No other volume takes its name, and what was written can still be copied."""
    up_volume(NAME, place.definition("one"), base=place.base)
    (place.target / "mine").write_text("written")
    shutil.rmtree(place.base / NAME)
    for attempt in (
        lambda: up_volume(NAME, place.definition("one"), base=place.base),
        lambda: down_volume(NAME, base=place.base),
    ):
        with pytest.raises(BtrfsUblkError, match="was removed while") as raised:
            attempt()
        assert str(place.target) in raised.value.message
        assert f"btrfs-ublk device down {NAME}" in (raised.value.hint or "")
        assert not (place.base / NAME).exists()
    assert (place.target / "mine").read_text() == "written"
    # As the hint says.
    run(["umount", place.target], timeout_s=10)
    remove_device(NAME)
    up_volume(NAME, place.definition("one"), base=place.base)
    assert place.matches("one")
