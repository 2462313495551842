"""Containers as overlays: a commit gives others what the container has seen."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.devices import new_btrfs
from support.needs import Need
from support.snapshotter import Client, served
from support.trees import GRANTING_ACL, Tree, describe, differences
from support.volumes import base_tree, change

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT
from btrfs_ublk.base.process import run
from btrfs_ublk.containers.overlay import merge_overlay
from btrfs_ublk.containers.snapshots import MODE, Snapshots
from btrfs_ublk.containers.store import SNAPSHOT_REF, Kind
from btrfs_ublk.kernel.btrfs import create_snapshot
from btrfs_ublk.units import MIB

pytestmark = [pytest.mark.data, pytest.mark.device]
OVERLAY = {MODE: "overlay"}
#: Calls of a merge, before each of which a process may be killed.
STEPS = ("rename", "unlink", "rmdir", "removexattr", "fchmod", "utime")


@pytest.fixture
def root(need: Need, test_root: Path) -> Iterator[Path]:
    need(ROOT, BTRFS, LOOP)
    with new_btrfs(test_root, size_bytes=1 << 30) as mount:
        yield mount / "root"


@contextmanager
def shown(client: Client, key: str, target: Path) -> Iterator[Path]:
    """Mount a snapshot as containerd does."""
    (mount,) = client.call("Mounts", key=key).mounts
    assert mount.type == "overlay"
    target.mkdir(exist_ok=True)
    options = ",".join(mount.options)
    argv = ["mount", "-t", mount.type, "-o", options, mount.source, target]
    run(argv, timeout_s=60)
    try:
        yield target
    finally:
        run(["umount", target], timeout_s=60)


def committed(client: Client, work: Path) -> None:
    """Have a snapshot "image" with a tree."""
    directory = client.prepare("unpack", labels={**OVERLAY, SNAPSHOT_REF: "sha256:1"})
    run(["cp", "-a", f"{base_tree(work)}/.", directory], timeout_s=60)
    client.commit("image", "unpack")


def changed(client: Client, key: str, target: Path) -> Tree:
    client.call("Prepare", key=key, parent="image", labels=OVERLAY)
    with shown(client, key, target) as one:
        change(one, "overlay")
        os.rename(one / "new", one / "renamed")
        (one / "renamed/file").rename(one / "renamed/again")
        (one / "var/to-directory/x").unlink()
        return describe(one)


def view(client: Client, key: str, parent: str) -> Path:
    (mount,) = client.call("View", key=key, parent=parent).mounts
    return Path(mount.source)


def test_a_commit_has_what_was_seen(root: Path, tmp_path: Path) -> None:
    with served(root) as client:
        committed(client, tmp_path)
        seen = changed(client, "container", tmp_path / "mnt")
        size = client.call("Usage", key="container").size
        client.commit("changed", "container")
        found = view(client, "view", "changed")
        assert differences(seen, describe(found)) == []
        assert list(found.glob(".btrfs-ublk*")) == []
        assert abs(client.call("Usage", key="changed").size - size) < MIB
        # And so has a container upon that, which shows no work of the first one.
        client.call("Prepare", key="second", parent="changed", labels=OVERLAY)
        with shown(client, "second", tmp_path / "mnt") as second:
            assert differences(seen, describe(second)) == []
            (second / "etc/motd").write_text("second\n")
        assert (found / "etc/motd").read_text() == "changed\n"
        client.remove("second")


def test_no_access_is_granted_that_the_image_denies(root: Path, tmp_path: Path) -> None:
    """What we make in others' directories would inherit their default ACLs, and the
    groups of those with the set-group-ID bit: in the image's tree, or above all."""
    root.mkdir(mode=0o700)
    os.chown(root, 0, 4)
    root.chmod(0o2750)
    os.setxattr(root, "system.posix_acl_default", GRANTING_ACL)
    with served(root) as client:
        directory = client.prepare("empty")
        assert os.listxattr(directory) == []
        assert (directory.stat().st_gid, directory.stat().st_mode) == (0, 0o40755)
        tree = base_tree(tmp_path)
        tree.chmod(0o2750)
        os.setxattr(tree, "system.posix_acl_default", GRANTING_ACL)
        directory = client.prepare(
            "unpack", labels={**OVERLAY, SNAPSHOT_REF: "sha256:1"}
        )
        run(["cp", "-a", f"{tree}/.", directory], timeout_s=60)
        client.commit("image", "unpack")
        expected = describe(view(client, "view", "image"))
        assert expected == describe(tree)
        client.call("Prepare", key="container", parent="image", labels=OVERLAY)
        with shown(client, "container", tmp_path / "mnt") as one:
            assert differences(expected, describe(one)) == []
        client.commit("unchanged", "container")
        found = describe(view(client, "again", "unchanged"))
        assert differences(expected, found) == []


def test_a_killed_merge_goes_on(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    with served(root) as client:
        committed(client, tmp_path)
        seen = changed(client, "container", tmp_path / "mnt")
    snapshots = Snapshots(root)
    (one,) = [x for x in snapshots.store.find() if x.kind is Kind.ACTIVE]
    snapshots.close()
    for number in itertools.count():
        create_snapshot(root / "snapshots" / str(one.id), root, f"try{number}")
        left = number * 7  # calls before the kill

        with monkeypatch.context() as patch:
            for name in STEPS:
                real = getattr(os, name)

                def step(*args: object, real: object = real, **keys: object) -> object:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise Killed
                    return real(*args, **keys)  # type: ignore[operator]

                patch.setattr(os, name, step)
            try:
                merge_overlay(root / f"try{number}")
            except Killed:
                pass
        was_killed = left < 0
        merge_overlay(root / f"try{number}")
        found = describe(root / f"try{number}")
        assert differences(seen, found) == [], number
        if not was_killed:
            break
    assert number > 3
