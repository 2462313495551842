"""Files of a volume that is up: added, removed, and how much of each was fetched."""

import os

import pytest
from support.volumes import NAME, Place
from support.waiting import wait_until

from btrfs_ublk.testing.range_server_fixtures import range_server
from btrfs_ublk.units import GIB, KIB, MIB
from btrfs_ublk.volume import KeptFile, VolumeFile, down_volume, show_volume, up_volume
from btrfs_ublk.volume.store import volume_directory

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def one_file(place: Place) -> None:
    up_volume(NAME, place.definition("a"), base=place.base)


def paths(place: Place) -> list[str]:
    """The files of the definition, as the next `up` has it."""
    definition = volume_directory(NAME, place.base).definition()
    return [entry.path for entry in definition.files]


def again(place: Place) -> None:
    down_volume(NAME, base=place.base)
    assert place.command("up", NAME).returncode == 0


@pytest.mark.usefixtures("one_file")
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


@pytest.mark.usefixtures("one_file")
def test_what_a_volume_cannot_take(place: Place) -> None:
    (place.target / "written").write_text("mine")
    large = place.root / "large"
    with large.open("wb") as file:
        file.truncate(2 * GIB)
    for words, said in (
        (["add-file", NAME, f"dir/a={place.content('b')}"], "has had a file 'dir/a'"),
        (["add-file", NAME, f"written={place.content('b')}"], "is a file 'written'"),
        (["add-file", NAME, f"dir/a/b={place.content('b')}"], "'dir/a', a file"),
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


SIZE_BYTES = MIB + 77
COUNT = 23


def test_how_much_of_each_file_is_here(place: Place) -> None:
    web = place.root / "web"
    web.mkdir()
    for number in range(COUNT):
        (web / str(number)).write_bytes(os.urandom(SIZE_BYTES))
    with range_server(web, log=place.root / "log", timeout_s=60) as server:
        files = [VolumeFile.parse(f"{x}={server.url(str(x))}") for x in range(COUNT)]
        files += [
            VolumeFile.from_keys({"path": "empty", "size": 0}),
            VolumeFile.parse('computed={"kind": "pattern", "size": 4096}'),
        ]
        definition = place.definition(files=tuple(files))
        up_volume(NAME, definition, base=place.base)
        (place.target / "0").read_bytes()
        with open(place.target / "1", "rb") as file:
            file.read(4 * KIB)

        def files_there() -> dict[str, KeptFile]:
            return {x.path: x for x in show_volume(NAME, base=place.base).files}

        # What was read comes into the cache after the answer.
        wait_until(lambda: files_there()["0"].cached_bytes == SIZE_BYTES)
        wait_until(lambda: files_there()["1"].cached_bytes)
        found = files_there()
        assert found["0"].size_bytes == SIZE_BYTES
        part = found["1"].cached_bytes
        assert part is not None and 4 * KIB <= part < SIZE_BYTES
        assert found["2"].cached_bytes == 0
        assert found["empty"].cached_bytes is found["computed"].cached_bytes is None
        for answer in (place.answer("status", NAME), place.answer("list")[0]):
            assert len(answer["files"]) == COUNT + 2
        assert place.answer("status", NAME)["files"][0]["cached_bytes"] == SIZE_BYTES
        lines = place.command("status", NAME).stdout.splitlines()
        assert sum(line.startswith("file ") for line in lines) == 20
        assert "0: 1 MiB of 1 MiB are here, from http://" in "".join(lines)
        assert lines[-1].split() == ["and", "5", "more:", "--json", "has", "all"]
        down_volume(NAME, base=place.base)
        # It is known again before anything is read.
        up_volume(NAME, definition, base=place.base)
        again = show_volume(NAME, base=place.base).files[0]
        assert again.cached_bytes == SIZE_BYTES
    down_volume(NAME, base=place.base)
    assert show_volume(NAME, base=place.base).files[0].cached_bytes is None
