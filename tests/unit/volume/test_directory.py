"""Directories of kept volumes, and what is none: nobody else's is removed."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.needs import moments
from support.processes import killed_at_event

from btrfs_ublk.base.signals import deferred
from btrfs_ublk.cli.gc import command as gc_command
from btrfs_ublk.cli.volume import command
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.volume import (
    down_volume,
    find_definition,
    list_volumes,
    remove_volume,
    show_volume,
)
from btrfs_ublk.volume.definition import VolumeDefinition
from btrfs_ublk.volume.store import (
    VOLUMES_VARIABLE,
    MadeFile,
    Session,
    VolumeDirectory,
    open_or_make,
    remove_halves,
)

HALF = ".kept.0123456789abcdef"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv(VOLUMES_VARIABLE, str(tmp_path))
    return tmp_path


def test_only_halves_of_volumes_are_removed(base: Path) -> None:
    """The base may be any directory: somebody's home, say."""
    kept = [".ssh", ".git", ".x.abc", f"{HALF}0", f".{HALF}", HALF.upper()]
    for name in (*kept, HALF, ".a.b-c.0123456789abcdef", ".locked.0123456789abcdef"):
        (base / name / "sub").mkdir(parents=True)
    link = base / ".link.0123456789abcdef"
    link.symlink_to(base / ".ssh")
    with VolumeDirectory(base / ".locked.0123456789abcdef").locked() as lock:
        remove_halves(base)
        assert lock.fileno() >= 0
    left = {path.name for path in base.iterdir()}
    assert left == {*kept, link.name, ".locked.0123456789abcdef", ".lock"}
    assert all((base / name / "sub").is_dir() for name in kept)


def test_files_are_counted_as_they_are_read(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = VolumeDirectory(base / "v")
    volume.path.mkdir()
    assert volume.whole_files(0) == volume.whole_files() == (0, [])
    paths = ["a", 'b"is_whole": true}', '"is_whole": true}', "half"]
    made = [
        MadeFile(
            path=path,
            source={"kind": "file", "path": path},
            offset=0,
            size_bytes=1,
            is_whole=path != "half",
        )
        for path in paths
    ]
    volume.write_files({one.path: one for one in made})
    assert volume.whole_files() == (3, made[:3])
    assert volume.whole_files(1) == (3, made[:1])
    file = volume.path / "files.json"
    text = file.read_text()
    # Another version of the program may have written them in another form.
    file.write_text(json.dumps(json.loads(text), indent=1))
    assert volume.whole_files(0) == (3, [])
    file.write_text(text[:-9])
    with pytest.raises(BtrfsUblkError, match="cannot be used"):
        volume.whole_files(0)
    file.write_text(text)
    monkeypatch.setattr(json, "loads", None)
    assert volume.whole_files(0) == (3, [])


def test_a_wait_for_a_volume_can_be_interrupted(base: Path) -> None:
    volume = VolumeDirectory(base / "v")
    volume.path.mkdir()
    for name in ("volume.json", "definition.toml"):
        (volume.path / name).touch()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    began_s = time.monotonic()
    with volume.locked(), pytest.raises(KeyboardInterrupt):
        timer.start()
        with deferred():
            open_or_make(volume, VolumeDefinition())
    assert time.monotonic() - began_s < 20


def test_what_is_no_volume_is_neither_listed_nor_removed(base: Path) -> None:
    others = [base / name for name in ("volumes", "empty", "images", ".hidden")]
    for path in others:
        path.mkdir(mode=0o700)
    # The directory of all volumes, whose names may be those of files.
    (base / "volumes/volume.json").mkdir()
    (base / "images/seed.img").touch()
    assert list_volumes(base=base) == []
    for path in others[:3]:
        for use in (remove_volume, down_volume, show_volume, find_definition):
            with pytest.raises(UsageError, match="is no volume"):
                use(path.name, base=base)
        done = CliRunner().invoke(command, ["remove", path.name, "--yes"])
        assert isinstance(done.exception, UsageError)
        assert path.is_dir() and not (path / "lock").exists()


@pytest.mark.parametrize(
    "files",
    [
        ("volume.json",),
        ("definition.toml", "lock"),
        ("seed.img", "sprout.img", "ledgers/x"),
    ],
)
def test_what_is_left_of_a_volume_can_be_removed(base: Path, files: list[str]) -> None:
    """Listed as damaged, however much of it is gone."""
    path = base / "kept"
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    assert [volume.state for volume in list_volumes(base=base)] == ["damaged"]
    remove_volume("kept", base=base)
    assert [each.name for each in base.iterdir()] == [".lock"]


@pytest.mark.parametrize("by", ["again", "gc"])
def test_what_a_killed_removal_left_is_removed(base: Path, by: str) -> None:
    """Wherever it was killed; by the same command again, and by gc."""
    seen = set()
    for number in moments():
        for name in ("ledgers", "cache"):
            (base / "kept" / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("definition.toml", "lock", "cache/file"):
            (base / "kept" / name).touch()
        was_killed = killed_at_event(number, lambda: remove_volume("kept"))
        left = [path for path in base.iterdir() if path.name not in ("kept", ".lock")]
        if by == "gc":
            listed = CliRunner().invoke(
                gc_command, ["--dry-run"], standalone_mode=False
            )
            assert [str(path) in listed.output for path in left] == [True] * len(left)
            done = CliRunner().invoke(gc_command, ["--json"], standalone_mode=False)
            assert done.return_value == 0
            removed = [{"path": str(path), "result": "removed"} for path in left]
            assert json.loads(done.output)["volumes"] == removed
            seen |= {path.name for path in base.iterdir()}
            if (base / "kept").exists():
                remove_volume("kept")
        else:
            with suppress(UsageError):
                remove_volume("kept")
        assert [path.name for path in base.iterdir()] == [".lock"]
        if not was_killed:
            break
    assert seen <= {"kept", ".lock"}
    assert number > 15


def test_what_a_killed_writer_left_goes_with_the_next_lock(base: Path) -> None:
    volume = VolumeDirectory(base / "kept")
    volume.path.mkdir(mode=0o700)
    session = Session(boot_id="", target="/mnt", made_target=False)
    lefts = set()
    for number in count(1):
        was_killed = killed_at_event(number, lambda: volume.write_session(session))
        lefts |= set(os.listdir(volume.path))
        with volume.locked():
            assert set(os.listdir(volume.path)) <= {"lock", "session.json"}
        if not was_killed:
            break
    assert ".session.json.new" in lefts
