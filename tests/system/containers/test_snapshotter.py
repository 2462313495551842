"""The snapshotter, asked as containerd asks it."""

import errno
import gc
import itertools
import json
import os
import random
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from support.devices import fill, new_btrfs
from support.processes import ending_with_us, stop
from support.snapshotter import Client, connected, refused, served
from support.waiting import wait_until

from btrfs_ublk import __version__
from btrfs_ublk.base.process import run
from btrfs_ublk.containers.filters import lookup_of, parse_filters
from btrfs_ublk.containers.service import serving
from btrfs_ublk.containers.snapshots import MODE, Snapshots
from btrfs_ublk.containers.store import Kind, SnapshotStore
from btrfs_ublk.device.state import RUN_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.btrfs import create_subvolume

MIB = 1 << 20
KILLS = 5
native = pytest.mark.device


@pytest.fixture
def btrfs(test_root: Path) -> Iterator[Path]:
    with new_btrfs(test_root, size_bytes=1 << 30) as mount:
        yield mount


@pytest.fixture
def root(btrfs: Path) -> Path:
    return btrfs / "root"


@pytest.fixture
def client(root: Path) -> Iterator[Client]:
    with served(root) as client:
        yield client


@pytest.mark.data
@native
def test_a_layer_upon_a_layer(client: Client, root: Path) -> None:
    first = client.prepare("first-active", labels={"a": "1"})
    assert os.stat(first).st_mode & 0o777 == 0o755
    (first / "file").write_text("first")
    client.commit("first", "first-active", labels={"b": "2"})
    second = client.prepare("second", "first", labels={"c": "3"})
    (second / "file").write_text("second")
    assert (first / "file").read_text() == "first"
    with pytest.raises(OSError, match="Read-only"):
        (first / "other").touch()
    assert client.names() == {"first": "committed", "second": "active"}
    assert client.info("first").labels == {"b": "2"}
    assert client.info("second").parent == "first"
    assert client.info("second").labels == {"c": "3"}
    client.remove("second")
    client.remove("first")
    assert os.listdir(root / "snapshots") == []


@pytest.mark.data
@native
def test_a_view_is_the_committed_subvolume(client: Client, root: Path) -> None:
    client.prepare("active")
    client.commit("committed", "active")
    before = os.listdir(root / "snapshots")
    (mount,) = client.call("View", key="view", parent="committed").mounts
    assert mount.options == ["rbind", "ro"]
    assert client.call("Mounts", key="view").mounts == [mount]
    assert os.listdir(root / "snapshots") == before
    client.remove("view")
    assert os.path.isdir(mount.source)
    # One of nothing has a directory of its own.
    (mount,) = client.call("View", key="empty").mounts
    with pytest.raises(OSError, match="Read-only"):
        (Path(mount.source) / "file").touch()


@native
def test_what_is_refused(client: Client) -> None:
    client.prepare("base")
    client.commit("bottom", "base")
    client.prepare("active", "bottom")
    client.call("View", key="view", parent="bottom")
    code = grpc.StatusCode
    expected = {
        code.NOT_FOUND: [
            lambda: client.info("absent"),
            lambda: client.prepare("new", "absent"),
            lambda: client.commit("new", "absent"),
            lambda: client.remove("absent"),
            lambda: client.call("Mounts", key="absent"),
            lambda: client.call("Usage", key="absent"),
            lambda: client.call("Update", info={"name": "absent"}),
        ],
        code.ALREADY_EXISTS: [
            lambda: client.prepare("active", "bottom"),
            lambda: client.call("View", key="active", parent="bottom"),
            lambda: client.prepare("bottom"),
            lambda: client.commit("bottom", "active"),
        ],
        code.FAILED_PRECONDITION: [
            lambda: client.commit("new", "view"),
            lambda: client.remove("bottom"),
            lambda: client.call("Mounts", key="bottom"),
        ],
        code.INVALID_ARGUMENT: [
            lambda: client.prepare("new", "active"),
            lambda: client.prepare(""),
            lambda: client.prepare("new", "bottom", labels={MODE: "overlayfs"}),
            lambda: client.commit("", "active"),
            lambda: client.commit("new", "active", parent="other"),
            lambda: client.names("kind=active"),
            lambda: client.call(
                "Update", info={"name": "active"}, update_mask={"paths": ["parent"]}
            ),
        ],
    }
    before = client.names()
    for status, calls in expected.items():
        for call in calls:
            assert refused(call)[0] == status
    assert client.names() == before
    text = refused(lambda: client.prepare("new", labels={MODE: "other"}))[1]
    assert text == f"label {MODE} is 'other'; there are: snapshot, overlay"
    text = refused(lambda: client.remove("bottom"))[1]
    assert "cannot remove snapshot 'bottom': it is the parent of 'active'" == text


def status(address: Path, *options: str, expected: int) -> str:
    command = [sys.executable, "-m", "btrfs_ublk.cli.main", "snapshotter", "status"]
    done = run(
        [*command, "--socket", address, *options], timeout_s=60, ok_statuses=(expected,)
    )
    return done.stdout + done.stderr


@native
def test_status_of_one_that_serves(client: Client, root: Path) -> None:
    address = root.with_suffix(".sock")
    path = client.prepare("a")
    (path / "file").write_bytes(os.urandom(3 * MIB))
    client.commit("lower", "a")
    client.prepare("upper", "lower")
    client.prepare("other", "lower")
    found = json.loads(status(address, "--json", expected=0))
    assert found.pop("used_bytes") // MIB == 3
    assert found == {
        "socket": str(address),
        "serves": True,
        "root": str(root),
        "version": __version__,
        "snapshots": {"view": 0, "active": 2, "committed": 1},
        "layers": {"": {"lazy": 0, "ordinary": 1}},
        "fallbacks": {},
        "images": [],
    }
    words = status(address, expected=0)
    assert f"serves {root}, version {__version__}" in words
    assert "snapshots: 0 view, 2 active, 1 committed; space used: 3" in words


def test_status_where_nobody_serves(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    said = status(path, expected=1)
    assert f"no snapshotter answers at {path}: No such file or directory\n" in said
    assert f"btrfs-ublk snapshotter serve --socket {path}" in said
    path.touch()
    assert "it is no socket" in status(path, expected=1)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as left:  # as a killed process leaves it
        left.bind(str(path))
    found = json.loads(status(path, "--json", expected=1))
    assert found["serves"] is False and found["socket"] == str(path)


@native
def test_a_subvolume_that_no_path_leads_to_goes_as_well(
    client: Client, root: Path
) -> None:
    """Its path is too long for any call, and what a container has put beside it leads
    out of the snapshot. The names of files do not matter."""
    path = client.prepare("active")
    create_subvolume(path, "inner")
    outside = create_subvolume(root, "outside")
    (outside / "file").touch()
    (path / "link").symlink_to(root)
    fd = os.open(path / "inner", os.O_RDONLY | os.O_DIRECTORY)
    try:
        for _ in range(20):
            os.mkdir("d" * 250, dir_fd=fd)
            deeper = os.open("d" * 250, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = deeper
        for name in ("one", "two"):
            create_subvolume(Path(f"/proc/self/fd/{fd}"), name)
    finally:
        os.close(fd)
    client.remove("active")
    assert os.listdir(root / "snapshots") == []
    assert (outside / "file").exists()


@native
def test_the_socket_of_another_root_is_not_taken(
    client: Client, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor its devices."""
    socket = root.with_suffix(".sock")
    with pytest.raises(UsageError, match="another snapshotter has its devices in"):
        with serving(root.with_name("other"), root.with_suffix(".other")):
            pass
    monkeypatch.setenv(RUN_VARIABLE, str(root.with_name("run")))
    with pytest.raises(UsageError, match="another process listens on .*root.sock"):
        with serving(root.with_name("other"), socket):
            pass
    with connected(socket) as another:
        another.prepare("one")
    assert client.names() == {"one": "active"}


@pytest.mark.parametrize(
    "version",
    [
        "DROP INDEX of_image; ALTER TABLE snapshots DROP COLUMN image;"
        "ALTER TABLE snapshots DROP COLUMN layer; DROP TABLE images;"
        "ALTER TABLE snapshots DROP COLUMN overlay; PRAGMA user_version = 1;",
        "ALTER TABLE snapshots DROP COLUMN overlay; PRAGMA user_version = 2;",
    ],
    ids=["1-no-images", "2-no-overlays"],
)
def test_a_file_of_a_version_before(tmp_path: Path, version: str) -> None:
    path = tmp_path / "snapshots.db"
    store = SnapshotStore(path)
    store.add("one", "", Kind.ACTIVE, {"a": "b"})
    store.close()
    with sqlite3.connect(path) as old:
        old.executescript(version)
    old.close()
    for _ in range(2):
        store = SnapshotStore(path)
        (found,) = store.find()
        assert (found.name, found.labels, found.image) == ("one", {"a": "b"}, None)
        assert store.images() == []
        store.close()


@pytest.mark.data
@native
def test_half_made_ones_go_at_the_next_start(root: Path) -> None:
    snapshots = Snapshots(root)
    snapshots.prepare("kept", "", {})
    snapshots.prepare("lost", "", {})
    snapshots.commit("lower", "lost", {})
    snapshots.prepare("upper", "lower", {})
    snapshots.view("shown", "lower", {})
    lower = snapshots.store.get("lower").id
    kept = snapshots.store.get("kept").id
    snapshots.close()
    directory = root / "snapshots"
    create_subvolume(directory, "99")
    run(["btrfs", "subvolume", "delete", directory / f"{lower}"], timeout_s=60)
    # As a commit leaves it, when it is killed before its row is written.
    run(["btrfs", "property", "set", directory / f"{kept}", "ro", "true"], timeout_s=60)
    snapshots = Snapshots(root)
    assert [one.name for one in snapshots.store.find()] == ["kept"]
    assert os.listdir(directory) == [f"{kept}"]
    (directory / f"{kept}" / "file").touch()
    snapshots.close()


@pytest.mark.data
@native
def test_a_kill_leaves_nothing_half_made(root: Path) -> None:
    """Whatever a killed process was doing, each snapshot has its directory after the
    next start, and each directory its snapshot; committed ones have what they had."""
    socket = root.with_suffix(".sock")
    committed: set[str] = set()
    gone = threading.Event()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)

    def work(client: Client, number: int) -> None:
        for turn in itertools.count():
            key = f"{number}-{turn}"
            try:
                path = client.prepare(f"{key}-active")
                (path / "file").write_text(key)
                client.commit(key, f"{key}-active")
                committed.add(key)
                client.prepare(f"{key}-upper", key)
                client.remove(f"{key}-upper")
            except (grpc.RpcError, OSError):
                assert gone.wait(60)
                return

    for number in range(KILLS):
        gone.clear()
        command = [sys.executable, "-m", "btrfs_ublk.cli.main", "snapshotter", "serve"]
        process = subprocess.Popen(
            ending_with_us([*command, "--root", root, "--socket", socket])
        )
        try:
            with connected(socket) as client:
                names = client.names()
                for key in committed:
                    assert names[key] == "committed"
                directories = os.listdir(root / "snapshots")
                assert len(directories) == len(names)
                worker = threading.Thread(target=work, args=(client, number))
                worker.start()
                while not any(key.startswith(f"{number}-") for key in set(committed)):
                    assert worker.is_alive()
                threading.Event().wait(moments.uniform(0, 0.2))
                process.kill()
                process.wait(60)
                gone.set()
                worker.join(60)
                assert not worker.is_alive()
        finally:
            gone.set()
            stop(process)
    snapshots = Snapshots(root)
    for key in committed:
        path = root / "snapshots" / str(snapshots.store.get(key).id) / "file"
        assert path.read_text() == key
    snapshots.close()


@pytest.mark.data
@native
def test_a_full_disk_is_said_and_removal_makes_room(test_root: Path) -> None:
    """What is on it stays, and containerd can remove what it does not need."""
    with new_btrfs(test_root, size_bytes=192 * MIB) as mount:
        address = mount / "root.sock"
        with serving(mount / "root", address), connected(address) as client:
            (client.prepare("layer") / "file").write_text("layer")
            client.commit("image", "layer")
            waiting = client.prepare("waiting", "image")
            (waiting / "new").write_bytes(bytes(MIB))
            container = client.prepare("container", "image")
            (container / "subdirectory").mkdir()
            fill(container)
            os.sync()
            fill(container / "subdirectory")

            def ask() -> None:
                for number in range(200):
                    client.prepare(f"more-{number}", "image")

            code, said = refused(ask)
            assert code == grpc.StatusCode.INTERNAL and "full" in said
            code, said = refused(lambda: client.commit("other", "waiting"))
            assert code == grpc.StatusCode.INTERNAL and "full" in said
            assert (waiting / "file").read_text() == "layer"
            for name, kind in client.names().items():
                if kind == "active" and name != "waiting":
                    client.remove(name)
            client.call("Cleanup")
            client.commit("other", "waiting")
            (client.prepare("again", "other") / "file").write_bytes(bytes(MIB))


@pytest.mark.data
def test_after_a_sync_that_failed_nothing_counts_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells one descriptor of the failure, and the next one of none."""
    store = SnapshotStore(tmp_path / "snapshots.db")
    store.add("before", "", Kind.ACTIVE, {})
    begun, released = threading.Event(), threading.Event()
    failures: list[int] = []

    def sync(fd: int) -> None:
        begun.set()
        assert released.wait(60)
        if not failures:
            failures.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", sync)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(store.add, "one", "", Kind.ACTIVE, {})]
        assert begun.wait(60)
        calls.append(pool.submit(store.add, "two", "", Kind.ACTIVE, {}))
        calls.append(pool.submit(store.remove, "before"))
        wait_until(lambda: store._asked == 4)
        released.set()
    for call in calls:
        with pytest.raises(BtrfsUblkError, match="Input/output error") as caught:
            call.result()
        assert "restart the snapshotter" in str(caught.value.hint)
    with pytest.raises(BtrfsUblkError, match="nothing is changed any more"):
        store.add("three", "", Kind.ACTIVE, {})
    store.close()  # It leaves the log as it is, and so does its end.
    vars(store).clear()
    gc.collect()
    assert (tmp_path / "snapshots.db-wal").stat().st_size


FIELDS = {"name": "n/1", "parent": "", "kind": "active"}
LABELS = {"a": "1", "containerd.io/gc.root": "yes, it is", "empty": ""}


def test_filters() -> None:
    for text, matches in (
        ("kind==active", True),
        ('parent==""', True),
        ("name==n/1,kind==view", False),
        ("labels.a", True),
        ("labels.b!=1", True),
        ('labels."containerd.io/gc.root"=="yes, it is"', True),
        ('labels."containerd.io/gc.root"~=|s, .*is$|', True),
        ("labels.a~=/[02]/", False),
        (r'name=="n\u002f1"', True),
    ):
        assert parse_filters([text])(lookup_of(FIELDS, LABELS)) is matches, text
        assert parse_filters([text, "kind==active"])(lookup_of(FIELDS, LABELS))
    for text, words in (
        ("", "expected the name of a field at character 1"),
        ("kind=active", "expected a comma, or the end at character 5"),
        ('labels."a', "expected the name of a field at character 8"),
        ('name~="("', "is no regular expression"),
    ):
        with pytest.raises(UsageError) as caught:
            parse_filters([text])
        assert words in str(caught.value)


@native
def test_ids_of_a_user_namespace(root: Path) -> None:
    """Which an overlay would have the host's of."""
    labels = {
        f"containerd.io/snapshot/{kind}mapping": "0:100000:65536"
        for kind in ("uid", "gid")
    }
    with served(root, mode="overlay") as client:
        client.call("Prepare", key="base", labels=labels)
        client.commit("base-image", "base")
        client.call("Prepare", key="one", parent="base-image", labels=labels)
        (mount,) = client.call("Mounts", key="one").mounts
        maps = ["uidmap=0:100000:65536", "gidmap=0:100000:65536"]
        assert mount.type == "bind" and mount.options == ["rbind", "rw", *maps]
