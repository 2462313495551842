"""What a fork has changed, as a delta, makes an equal fork in another volume of the
image, and reads nothing of the image."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.images import _TABLE
from support.needs import Need
from support.trees import Tree, describe, differences
from support.volumes import NAME, Place, base_tree, change, fork, image_place, killed_at

from btrfs_ublk import server as servers
from btrfs_ublk.base.capabilities import BTRFS, BTRFS_PROGS, LOOP, ROOT
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.kernel.btrfs import create_snapshot, set_read_only
from btrfs_ublk.kernel.send import write_changes
from btrfs_ublk.units import MIB
from btrfs_ublk.volume import ForkMode, apply_delta, down_volume
from btrfs_ublk.volume import forks as fork_module
from btrfs_ublk.volume import forks_of_image, unfork_image, up_volume, write_delta
from btrfs_ublk.volume.device import find_device
from btrfs_ublk.volume.store import volume_directory

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("in_process")]

OTHER = "other"


@pytest.fixture
def place(
    need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """An image that is up as NAME."""
    need(ROOT, BTRFS, BTRFS_PROGS, LOOP)
    found = image_place(sparse_path, monkeypatch)
    tree = base_tree(sparse_path)
    options = BuildOptions(compression="none")
    build_image(tree, sparse_path / "layout", options, tag="app")
    up(found, NAME)
    yield found
    found.take_all_down()


def up(place: Place, name: str, tag: str = "app") -> None:
    image = f"oci:{place.root / 'layout'}:{tag}"
    up_volume(name, place.definition(image=image), base=place.base)


def swap(place: Place, tag: str = "app") -> None:
    """Have another volume up instead. Two of one image would be two of one seed."""
    down_volume(NAME, base=place.base)
    up(place, OTHER, tag)


def fetched_bytes(place: Place) -> int:
    device = find_device(volume_directory(OTHER, place.base), ask=True)
    assert device is not None and device.stats is not None
    stats = servers.ServerStats.parse(device.stats)
    return sum(lazy.fetcher.bytes_fetched for lazy in stats.lazy)


def is_clean(place: Place) -> bool:
    commits = place.target / "commits"
    return not commits.exists() or list(commits.iterdir()) == []


def delta_of(place: Place, mode: ForkMode) -> tuple[Path, Tree]:
    one = fork(place, "one", mode)
    with (one / "big").open("r+b") as file:
        os.pwrite(file.fileno(), b"changed", MIB + 3)
    change(one, mode)
    delta = place.root / "delta"
    done = place.command("commit", NAME, "one", "--delta", delta, noun="image")
    assert done.returncode == 0, done.stderr
    assert is_clean(place)
    return delta, describe(one)


@pytest.mark.fuse
@pytest.mark.parametrize(
    "mode, many", [("snapshot", 1), ("overlay", 1), ("overlay", 0)]
)
def test_a_delta_makes_an_equal_fork(
    place: Place, mode: ForkMode, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there are many, and the fork's subvolume lacks the layer's tree."""
    monkeypatch.setattr(fork_module, "MANY_OVERLAYS", many)
    delta, expected = delta_of(place, mode)
    assert delta.stat().st_size < 2 * MIB
    own = place.target / "overlays/one"
    assert mode == "snapshot" or (own / "big").exists() == bool(many)
    swap(place)
    before = fetched_bytes(place)
    done = place.command("apply", OTHER, delta, "two", noun="image")
    assert (done.returncode, done.stderr) == (0, "")
    two = place.target / "forks/two"
    assert done.stdout == f"{two}\n"
    assert fetched_bytes(place) == before
    assert differences(expected, describe(two)) == []
    (found,) = forks_of_image(OTHER, base=place.base)
    assert (found.name, found.mode, found.is_mounted) == ("two", mode, True)
    assert found.layer is not None and is_clean(place)
    # It is a fork as all others: written to, kept, and committed again.
    (two / "more").write_text("more\n")
    down_volume(OTHER, base=place.base)
    up(place, OTHER)
    assert (two / "more").read_text() == "more\n"
    write_delta(OTHER, "two", place.root / "again", base=place.base)
    with pytest.raises(UsageError, match="choose|there is"):
        apply_delta(OTHER, delta, "two", base=place.base)
    apply_delta(OTHER, place.root / "again", "three", base=place.base)
    assert differences(describe(two), describe(place.target / "forks/three")) == []
    for name in ("two", "three"):
        unfork_image(OTHER, name, base=place.base)
    assert not any((place.target / "forks").iterdir()) and is_clean(place)


@pytest.mark.fuse
def test_what_cannot_be_applied_leaves_nothing(place: Place) -> None:
    delta, _ = delta_of(place, "snapshot")
    # Of another image.
    tree = place.root / "tree"
    (tree / "big").write_bytes(random.Random(3).randbytes(MIB))
    options = BuildOptions(compression="none")
    build_image(tree, place.root / "layout", options, tag="rebuilt")
    swap(place, "rebuilt")
    done = place.command("apply", OTHER, delta, "two", noun="image")
    assert done.returncode == 2 and "is a delta of subvolume" in done.stderr
    down_volume(OTHER, base=place.base)
    up(place, NAME)
    cut = place.root / "cut"
    data = delta.read_bytes()
    cut.write_bytes(data[: len(data) // 2])
    with pytest.raises(BtrfsUblkError, match="cannot be applied"):
        apply_delta(NAME, cut, "two", base=place.base)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    cut.write_bytes(flipped)
    with pytest.raises(BtrfsUblkError, match="cannot be applied"):
        apply_delta(NAME, cut, "two", base=place.base)
    for wrong in (b"", b"btrfs-stream\0\1\0\0\0", os.urandom(100)):
        cut.write_bytes(wrong)
        done = place.command("apply", NAME, cut, "two", noun="image")
        assert done.returncode == 2 and "is no delta" in done.stderr
    for words in ((), ("--delta", place.root / "x", "-t", "oci:x:y")):
        done = place.command("commit", NAME, "one", *words, noun="image")
        assert done.returncode == 2 and "--delta" in done.stderr
    done = place.command("commit", NAME, "one", "--delta", delta, noun="image")
    assert done.returncode == 2 and "exists" in done.stderr
    for step in ("_receive", "adopt_fork", "delete_or_warn"):
        apply = f"volume.apply_delta('{NAME}', {delta!r}, 'two', base={place.base!r})"
        killed_at(f"volume.commit:{step}", apply)
        assert not is_clean(place)
        if (
            step == "delete_or_warn"
        ):  # the fork is there, and the same command is refused
            with pytest.raises(UsageError, match="already"):
                apply_delta(NAME, delta, "two", base=place.base)
            unfork_image(NAME, "two", base=place.base)
        else:
            write_delta(NAME, "one", place.root / step, base=place.base)
        assert is_clean(place)
    assert [x.name for x in forks_of_image(NAME, base=place.base)] == ["one"]


@pytest.mark.fuse
def test_a_hostile_stream_stays_in_its_directory(place: Place) -> None:
    """What looks like an overlay of ours is looked at; links lead nowhere outside."""
    outside = place.root / "outside"
    outside.mkdir()
    layer = next((place.target / "layers").iterdir())
    for number, (upper, link) in enumerate(
        (
            (outside, f"../../../layers/{layer.name}"),
            (None, str(outside)),
            (None, f"../../../../layers/{layer.name}"),
        )
    ):
        own = create_snapshot(layer, place.target, f"hostile-{number}")
        top = own / ".btrfs-ublk-overlay"
        (top / "work").mkdir(parents=True)
        if upper is None:
            (top / "upper").mkdir()
        else:
            (top / "upper").symlink_to(upper)
        (top / "layer").symlink_to(link)
        set_read_only(own)
        delta = place.root / f"delta-{number}"
        with delta.open("wb") as file:
            write_changes(own, layer, file.fileno())
        with pytest.raises(UsageError, match="not what an overlay of this layer has"):
            apply_delta(NAME, delta, "two", base=place.base)
        assert is_clean(place)
    # Commands that were put in by hand. The link leads to where nothing is: the root of
    # `btrfs receive` is a directory of ours.
    own = create_snapshot(layer, place.target, "plain")
    set_read_only(own)
    delta = place.root / "plain"
    with delta.open("wb") as file:
        write_changes(own, layer, file.fileno())
    data = delta.read_bytes()
    to_outside = _command(8, (15, b"way"), (3, bytes(8)), (17, bytes(outside)))
    for path, why in (
        (b"way/escaped", "No such file"),
        (b"../../../escaped", "no single subvolume"),
        (b"inside", ""),
    ):
        made = _command(3, (15, path), (3, bytes(8)))
        delta.write_bytes(data[:-_END_BYTES] + to_outside + made + data[-_END_BYTES:])
        done = place.command("apply", NAME, delta, "two", noun="image")
        assert why in done.stderr and bool(done.returncode) == bool(why), done.stderr
        assert is_clean(place)
        assert list(outside.iterdir()) == []
        assert not (place.target / "escaped").exists()
    assert (place.target / "forks/two/inside").read_bytes() == b""


_END_BYTES = 10


def _command(number: int, *values: tuple[int, bytes]) -> bytes:
    body = b"".join(
        kind.to_bytes(2, "little") + len(value).to_bytes(2, "little") + value
        for kind, value in values
    )
    head = len(body).to_bytes(4, "little") + number.to_bytes(2, "little")
    # Streams have another crc32c: it begins with zero, and is not inverted.
    found = 0
    for byte in head + bytes(4) + body:
        found = _TABLE[(found ^ byte) & 255] ^ found >> 8
    return head + found.to_bytes(4, "little") + body
