"""``btrfs-ublk volume add-file`` and ``remove-file``: of a volume that is up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import Need
from support.volumes import NAME, Place

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE
from btrfs_ublk.units import GIB
from btrfs_ublk.volume import down_volume, up_volume
from btrfs_ublk.volume.store import volume_directory

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def place(
    need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    need(ROOT, BTRFS, LOOP, FUSE)
    monkeypatch.setenv(CONFIG_VARIABLE, str(sparse_path / "etc"))
    found = Place(sparse_path, "fuse")
    up_volume(NAME, found.definition("a"), base=found.base)
    yield found
    found.take_all_down()


def paths(place: Place) -> list[str]:
    """The files of the definition, as the next `up` has it."""
    definition = volume_directory(NAME, place.base).definition()
    return [entry.path for entry in definition.files]


def again(place: Place) -> None:
    down_volume(NAME, base=place.base)
    assert place.command("up", NAME).returncode == 0


def test_files_are_added_and_removed(place: Place) -> None:
    added = place.command("add-file", NAME, f"dir/b={place.content('b')}")
    assert (added.returncode, added.stdout) == (0, f"{place.target}/dir/b\n")
    assert added.stderr == f"3 MiB from {place.content('b')}\n"
    assert place.matches("b") and paths(place) == ["dir/a", "dir/b"]
    again(place)
    assert place.matches("a") and place.matches("b")
    with open(place.target / "dir/b", "r+b") as file:
        file.write(b"mine")
    (place.target / "kept").write_bytes((place.target / "dir/b").read_bytes())
    asked = place.command("remove-file", NAME, "dir/b")
    assert asked.returncode == 2 and "use --yes" in asked.stderr
    assert place.answer("remove-file", NAME, "dir/b", "--yes")["result"] == "removed"
    assert paths(place) == ["dir/a"]
    for _ in range(2):
        assert not (place.target / "dir/b").exists() and place.matches("a")
        assert (place.target / "kept").read_bytes()[:4] == b"mine"
        again(place)
    # The path is free for another source; the old one is as it was.
    other = place.command("add-file", NAME, f"dir/b={place.content('c')}")
    assert other.returncode == 0, other.stderr
    content = (place.target / "dir/b").read_bytes()
    assert content == place.content("c").read_bytes()
    answer = place.answer("add-file", NAME, f"d={place.content('b')}")
    assert answer["path"] == f"{place.target}/d" and answer["offset"] >= 0
    assert (place.target / "d").read_bytes() == place.content("b").read_bytes()
    # One that somebody has removed by hand.
    (place.target / "d").unlink()
    assert place.command("remove-file", NAME, "d", "--yes").returncode == 0
    assert paths(place) == ["dir/a", "dir/b"]


def test_what_a_volume_cannot_take(place: Place) -> None:
    (place.target / "written").write_text("mine")
    large = place.root / "large"
    with large.open("wb") as file:
        file.truncate(2 * GIB)
    (place.root / "etc/volumes").mkdir(parents=True)
    for words, said in (
        (["add-file", NAME, f"dir/a={place.content('b')}"], "has had a file 'dir/a'"),
        (["add-file", NAME, f"written={place.content('b')}"], "is a file 'written'"),
        (["add-file", NAME, f"dir/a/b={place.content('b')}"], "'dir/a', a file"),
        (["add-file", NAME, "x"], "FILE=URL: "),
        (["add-file", NAME, "x=/no/such"], "/no/such"),
        (["add-file", NAME, f"x={large}"], "room"),
        (["remove-file", NAME, "written", "--yes"], "no file 'written' in its defin"),
        (["remove-file", NAME, "../x", "--yes"], "'../x' is no path of a file"),
    ):
        refused = place.command(*words)
        assert refused.returncode in (1, 2) and said in refused.stderr, refused.stderr
    assert paths(place) == ["dir/a"] and not (place.target / "x").exists()
    assert (place.target / "written").read_text() == "mine"
    (place.target / "dir/a").unlink()
    (place.target / "dir/a").mkdir()
    refused = place.command("remove-file", NAME, "dir/a", "--yes")
    assert refused.returncode == 2 and "is a directory now" in refused.stderr
    definition = place.root / "etc/volumes" / f"{NAME}.toml"
    definition.write_text(f'mount = "{place.target}"\n')
    refused = place.command("remove-file", NAME, "dir/a", "--yes")
    assert refused.returncode == 2 and f"is defined in {definition}" in refused.stderr
    definition.unlink()
    down_volume(NAME, base=place.base)
    refused = place.command("add-file", NAME, f"x={place.content('b')}")
    assert refused.returncode == 2 and "is down" in refused.stderr
