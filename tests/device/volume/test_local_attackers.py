"""A user of a volume changes its directories while root works there."""

import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from support.attacker import UID, attacking, exchange, link_whatever_appears
from support.volumes import NAME, Place

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.beneath import exists_beneath, opened_directory, place_beneath
from btrfs_ublk.volume import VolumeFile, clone_in_volume, kept_volume, up_volume

pytestmark = pytest.mark.fuse

ROUNDS = 5


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that is only root's."""
    path = tmp_path / "victim"
    path.write_bytes(b"root's")
    path.chmod(0o600)
    return path


def give_away(directory: Path) -> Path:
    """A directory of another user's in a volume."""
    directory.mkdir()
    os.chown(directory, UID, UID)
    return directory


def test_links_in_the_place_of_new_files(place: Place, victim: Path) -> None:
    """Each file is whole, and the link's target is as it was."""
    definition = place.definition("one")
    with kept_volume(NAME, definition, base=place.base):
        home = give_away(place.target / "home")
        names = [f"n{number}" for number in range(ROUNDS)]
        step = link_whatever_appears(victim, frozenset(names))
        with attacking(home, step):
            for number in range(ROUNDS):
                files = [
                    VolumeFile.parse(f"home/{name}={place.content('one')}")
                    for name in names[: number + 1]
                ]
                changed = place.definition(files=(*definition.files, *files))
                up_volume(NAME, changed, base=place.base)
        assert stat.S_IMODE(victim.stat().st_mode) == 0o600
        assert victim.read_bytes() == b"root's"
        for name in names:
            assert (home / name).read_bytes() == place.content("one").read_bytes()
        assert sorted(os.listdir(home)) == sorted(names)


def test_a_link_in_the_place_of_a_directory(place: Place, tmp_path: Path) -> None:
    """Nothing is made outside of the volume."""
    outside = tmp_path / "outside"
    outside.mkdir()
    # Also what is removed again has changed its time.
    before = outside.stat().st_mtime_ns
    definition = place.definition("one")
    made = 0
    with kept_volume(NAME, definition, base=place.base) as volume:
        home = give_away(place.target / "home")
        give_away(home / "inner")
        (home / "link").symlink_to(outside)
        with attacking(home, exchange("inner", "link")):
            for number in range(8 * ROUNDS):
                path = f"home/inner/d{number}/file"
                file = VolumeFile.parse(f"{path}={place.content('one')}")
                files = (*definition.files, file)
                with suppress(BtrfsUblkError):
                    if number % 8:
                        clone_in_volume(
                            NAME,
                            f"home/inner/c{number}",
                            offset=volume.files[0].offset,
                            size_bytes=5000,
                            base=place.base,
                        )
                    else:
                        up_volume(NAME, place.definition(files=files), base=place.base)
                    made += 1
        assert outside.stat().st_mtime_ns == before
        assert made, "it was never as root had left it"


def test_places_beneath(tmp_path: Path) -> None:
    """What is refused, and what is made."""
    (tmp_path / "out").symlink_to("/")
    (tmp_path / "in").symlink_to("dir")
    (tmp_path / "dir").mkdir()
    made: list[str] = []
    with opened_directory(tmp_path) as top:
        for path in ("out/x", "in/x", "dir/../out/x", "out/d/x"):
            with pytest.raises(UsageError, match="symbolic link is on the way"):
                with place_beneath(top, path, made=made.append):
                    pass
        for path in ("/x", "../x", "dir/../../x"):
            with pytest.raises(UsageError, match="is outside of"):
                with place_beneath(top, path, made=made.append):
                    pass
        with pytest.raises(FileNotFoundError), place_beneath(top, "a/b/c"):
            pass
        assert made == [] and not exists_beneath(top, "a/b")
        with place_beneath(top, "a/b/c", made=made.append) as (directory, name):
            os.mkdir(name, dir_fd=directory)
        assert made == ["a", "a/b"] and exists_beneath(top, "a/b/c")
        with place_beneath(top, "out") as (_, name):
            assert name == "out"
