"""``btrfs-ublk volume snapshot``, ``rollback`` and the like: what snapshots have, what
is refused, and what kills leave."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import Need
from support.volumes import NAME, TIMEOUT_S, Place, image_place, killed_at

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.kernel.btrfs import (
    create_subvolume,
    enable_simple_quota,
    quota_limit,
    set_read_only,
    subvolume_id,
)
from btrfs_ublk.units import MIB
from btrfs_ublk.volume import (
    Volumes,
    add_tree,
    down_volume,
    rollback_volume,
    snapshot_volume,
    snapshots,
    up_volume,
)
from btrfs_ublk.volume.snapshots import opened_snapshots
from btrfs_ublk.volume.store import volume_directory

pytestmark = [pytest.mark.fuse, pytest.mark.data, pytest.mark.usefixtures("in_process")]


@pytest.fixture
def place(
    need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """A volume that is up, with a file of its own."""
    need(ROOT, BTRFS, LOOP, FUSE)
    found = image_place(sparse_path, monkeypatch)
    up(found)
    mine(found).write_text("first")
    yield found
    found.take_all_down()


def up(place: Place) -> None:
    up_volume(NAME, place.definition("lazy"), base=place.base)


def mine(place: Place) -> Path:
    return place.target / "mine"


def there_are(place: Place) -> dict[str, str]:
    """The snapshots, and what each has in the file; nothing but them is there."""
    with opened_snapshots(place.target) as directory:
        found = [x for x in directory.iterdir() if not x.name.startswith(".root-")]
        roots = set(directory.iterdir()) - set(found)
        assert [*map(subvolume_id, roots)] in ([], [subvolume_id(place.target)])
        listed = Volumes(place.base).get(NAME).snapshots()
        assert {x.name for x in found} == {x.name for x in listed}
        return {x.name: (x / "mine").read_text() for x in found}


def test_back_and_forth(place: Place) -> None:
    done = place.command("snapshot", NAME, "one")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    mine(place).write_text("second")
    (place.target / "dir/lazy").unlink()
    done = place.command("rollback", NAME, "one")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "what it had before is snapshot before-rollback-1\n"
    assert mine(place).read_text() == "first" and place.matches("lazy")
    mine(place).write_text("third")
    down_volume(NAME, base=place.base)
    up(place)
    assert mine(place).read_text() == "third"
    answer = place.answer("rollback", NAME, "before-rollback-1")
    assert answer["kept"] == "before-rollback-2"
    assert mine(place).read_text() == "second"
    assert not (place.target / "dir/lazy").exists()
    expected = {"one": "first", "before-rollback-1": "second"}
    assert there_are(place) == expected | {"before-rollback-2": "third"}
    first, *listed = place.command("snapshots", NAME).stdout.splitlines()
    assert first.split() == ["SNAPSHOT", "TIME"] and listed[0].endswith("Z")
    status = place.answer("status", NAME)
    assert status["state"] == "up"
    assert status["snapshots"] == [line.split()[0] for line in listed]
    asked = place.command("remove-snapshot", NAME, "before-rollback-2")
    assert asked.returncode == 2 and "--yes" in asked.stderr
    answer = place.answer("remove-snapshot", NAME, "before-rollback-2", "--yes")
    assert answer["result"] == "removed"
    assert there_are(place) == expected and mine(place).read_text() == "second"


def test_subvolumes_and_added_trees_are_in_it(place: Place) -> None:
    volume = Volumes(place.base).get(NAME)
    tree = place.root / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(os.urandom(MIB))
    access = RegistryAccess()
    added = add_tree(NAME, tree, "a/tree", access=access, base=place.base).path
    deep = create_subvolume(create_subvolume(added, "in"), "deep")
    (deep / "file").write_text("deep")
    set_read_only(deep)
    before = added.parent.stat().st_mtime_ns
    assert volume.snapshot("one") == volume.snapshots()[0]
    (added / "file").write_text("changed")
    set_read_only(deep, False)
    (deep / "file").write_text("changed")
    kept = volume.rollback("one")
    assert (added / "file").read_bytes() == (tree / "file").read_bytes()
    assert (deep / "file").read_text() == "deep"
    assert added.parent.stat().st_mtime_ns == before
    (added / "file").write_text("writable")
    with pytest.raises(OSError, match="Read-only"):
        (deep / "file").write_text("it was read-only")
    volume.rollback(kept)
    assert (added / "file").read_text() == (deep / "file").read_text() == "changed"
    for one in volume.snapshots():
        volume.remove_snapshot(one.name)
    assert there_are(place) == {}


def test_of_one_moment_while_others_write(place: Place) -> None:
    """A snapshot has nothing of what came after something that it lacks."""
    paths = [place.target / "1", place.target / "2"]
    written, is_over = threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            for path in paths:
                path.with_name("new").write_text(str(number))
                path.with_name("new").rename(path)
            written.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            written.clear()
            assert written.wait(TIMEOUT_S)
            snapshot_volume(NAME, f"s{number}", base=place.base)
    finally:
        is_over.set()
        writer.join()
    with opened_snapshots(place.target) as directory:
        for number in range(5):
            at = directory / f"s{number}"
            one, two = (int((at / path.name).read_text()) for path in paths)
            assert one - two in (0, 1)


def test_a_limit_stays(place: Place) -> None:
    try:
        enable_simple_quota(place.target)
    except BtrfsUblkError as error:
        pytest.skip(str(error))
    nested = create_subvolume(place.target, "nested")
    run(["btrfs", "qgroup", "limit", "16M", nested], timeout_s=60)
    snapshot_volume(NAME, "one", base=place.base)
    run(["btrfs", "qgroup", "limit", "64M", place.target], timeout_s=60)
    rollback_volume(NAME, "one", base=place.base)
    limits = [quota_limit(x, subvolume_id(x)) for x in (place.target, nested)]
    assert limits == [64 * MIB, 16 * MIB]


@pytest.mark.usefixtures("short_waits")
def test_what_is_refused_changes_nothing(place: Place) -> None:
    def refused(status: int, why: str, *words: str) -> None:
        done = place.command(*words)
        assert (done.returncode, why in done.stderr) == (status, True), done.stderr

    snapshot_volume(NAME, "one", base=place.base)
    mine(place).write_text("second")
    refused(2, "has a snapshot 'one'", "snapshot", NAME, "one")
    refused(2, "'../x' cannot be the name of a snap", "snapshot", NAME, "../x")
    refused(2, "no snapshot 'two'", "rollback", NAME, "two")
    refused(2, "no snapshot '.'", "remove-snapshot", NAME, ".", "--yes")
    with mine(place).open():
        refused(1, f"pid {os.getpid()}", "rollback", NAME, "one")
    source = run(["findmnt", "-nvo", "SOURCE", place.target], timeout_s=60).stdout
    elsewhere = place.root / "elsewhere"
    elsewhere.mkdir()
    # As docs/volumes.md has it.
    options = ["-o", "ro,subvol=snapshots/one", source.strip(), elsewhere]
    run(["mount", *options], timeout_s=60)
    try:
        assert (elsewhere / "mine").read_text() == "first"
        refused(1, f"at {elsewhere}", "remove-snapshot", NAME, "one", "--yes")
    finally:
        run(["umount", elsewhere], timeout_s=60)
    run(["fsfreeze", "--freeze", place.target], timeout_s=60)
    try:
        refused(1, "is frozen", "snapshot", NAME, "two")
    finally:
        run(["fsfreeze", "--unfreeze", place.target], timeout_s=60)
    assert there_are(place) == {"one": "first"} and mine(place).read_text() == "second"
    run(["mount", "-o", "remount,ro", place.target], timeout_s=60)
    refused(2, "it is read-only", "snapshot", NAME, "two")
    down_volume(NAME, base=place.base)
    refused(2, f"volume up {NAME}", "snapshot", NAME, "two")
    assert place.command("remove", NAME, "--yes").returncode == 0


def test_a_volume_of_an_image_has_forks(place: Place) -> None:
    tree, layout = place.root / "tree", place.root / "layout"
    tree.mkdir()
    image = build_image(tree, layout, BuildOptions(), tag="x").name
    definition = place.definition(image=str(image), mount=place.root / "sealed")
    up_volume("sealed", definition, base=place.base)
    done = place.command("snapshot", "sealed", "one")
    assert done.returncode == 2 and "image fork sealed" in done.stderr
    assert place.answer("status", "sealed")["snapshots"] == []


def test_a_rollback_that_fails_leaves_all_as_it_was(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot_volume(NAME, "one", base=place.base)
    mine(place).write_text("second")

    def fail(*_: object) -> None:
        raise BtrfsUblkError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "set_default_subvolume", fail)
        with pytest.raises(BtrfsUblkError, match="was not rolled back"):
            rollback_volume(NAME, "one", base=place.base)
    assert "no room" in caplog.text
    assert place.state() == "up" and mine(place).read_text() == "second"
    assert there_are(place) == {"one": "first"}
    assert volume_directory(NAME, place.base).rollback() is None


#: Where a rollback is killed, before the N-th call; and if it takes place then.
_ROLLBACK = (
    ("up.take_down", 1, False),
    ("up.VolumeDirectory.write_rollback", 1, False),
    ("up.bring_up", 1, True),
    ("snapshots.create_deep_snapshot", 1, True),
    ("snapshots.commit_transaction", 1, True),
    ("snapshots.set_default_subvolume", 1, True),
    ("snapshots.commit_transaction", 2, True),
    ("snapshots._place_of", 2, True),
    ("snapshots.set_read_only", 1, True),
    ("snapshots.commit_transaction", 3, True),
    ("up.VolumeDirectory.forget_rollback", 1, True),
    ("up._mount", 1, True),
    ("up.limit_cache", 1, True),
)


def killed(place: Place, function: str, step: str, at: int = 1) -> None:
    module, _, path = step.partition(".")
    words = f"volume.{function}('{NAME}', 'one', base={place.base!r})"
    killed_at(f"volume.{module}:{path}", words, call=at)


@pytest.mark.parametrize(
    "steps",
    [_ROLLBACK[2::6], pytest.param(_ROLLBACK, marks=pytest.mark.thorough)],
    ids=["some", "all"],
)
def test_a_killed_rollback(place: Place, steps: tuple[tuple[str, int, bool]]) -> None:
    """It takes place with the next `up`, whole, or it has not begun."""
    snapshot_volume(NAME, "one", base=place.base)
    expected = {"one": "first"}
    for step, at, has_begun in steps:
        content = f"{step} {at}"
        mine(place).write_text(content)
        killed(place, "rollback_volume", step, at)
        if volume_directory(NAME, place.base).rollback() is not None:
            assert "its rollback to 'one'" in place.answer("status", NAME)["reason"]
        up(place)
        if has_begun:
            expected[f"before-rollback-{len(expected)}"] = content
        assert mine(place).read_text() == ("first" if has_begun else content), step
        assert there_are(place) == expected and place.state() == "up", step
        assert volume_directory(NAME, place.base).rollback() is None


def test_a_killed_snapshot_or_removal(place: Place) -> None:
    for step in ("snapshots.set_read_only", "snapshots.commit_transaction"):
        killed(place, "snapshot_volume", step)
        up(place)
        is_there = step.endswith("commit_transaction")
        assert there_are(place) == ({"one": "first"} if is_there else {}), step
    killed(place, "remove_snapshot", "snapshots.delete_subvolumes")
    up(place)
    assert there_are(place) == {}
