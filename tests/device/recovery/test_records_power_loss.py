"""Records of images, volumes and snapshots whose machine loses power at any moment:
what was acknowledged is there, and what is half-made is no obstacle."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.disks import ANSWER, SYNC, lay_out, read_log, states
from support.images import sealed_image
from support.needs import SOAK_PERCENT, share_of
from support.paths import CHILDREN

from btrfs_ublk.containers.store import Kind, SnapshotStore
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pull import open_sealed
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.seed import make_seed
from btrfs_ublk.units import TIB
from btrfs_ublk.volume.store import remove_halves, volume_directories

pytestmark = pytest.mark.data

CHILD = CHILDREN / "records.py"
#: Of each kind.
STATES_MIN = share_of(5_000, least_percent=5)
THINGS = share_of(40, least_percent=40)
#: Of all states, each of which takes a tenth of a second of a CPU.
LOOKED_AT = 1.0 if SOAK_PERCENT >= 100 else 0.08


def make_materials(what: str, directory: Path, tmp_path: Path) -> None:
    directory.mkdir()
    if what == "volumes":
        seed = make_seed(
            tmp_path / "seed.img", virtual_data_size=TIB, metadata_only=True
        )
        (directory / "seed.json").write_text(json.dumps(seed.to_dict()))
    for number in range(3) if what == "images" else ():
        image = sealed_image(tmp_path / f"layout-{number}", seed=number, units=1)
        layout, manifest, data = open_sealed(image.name)
        assert isinstance(layout, Layout)
        (directory / str(number)).mkdir()
        (directory / str(number) / "manifest.json").write_bytes(data)
        pack = layout.check(manifest.pack).read_bytes()
        (directory / str(number) / "pack").write_bytes(pack)


def look_at_images(directory: Path) -> dict[str, Any]:
    store, found = ImageStore(directory), {}
    for image in store.images():
        pack = hashlib.sha256(image.pack.read_bytes()).hexdigest()
        assert store.manifest(image.digest).pack.digest == f"sha256:{pack}"
        found |= {name: image.digest for name in image.names}
    store.collect(())
    assert not list(directory.glob(".new-*"))
    assert all(image.pinned for image in store.images())
    return found


def look_at_volumes(directory: Path) -> dict[str, Any]:
    found = {}
    for volume in volume_directories(directory):
        volume.check()
        assert volume.seed().path.read_bytes() == b"seed" * 1024
        volume.session()
        size = volume.definition().writable_bytes
        found[volume.name] = [size, sorted(volume.files())]
    if directory.exists():
        remove_halves(directory)
        assert {path.name for path in directory.iterdir()} <= {*found, ".lock"}
    return found


def look_at_snapshots(directory: Path) -> dict[str, Any]:
    with closing(SnapshotStore(directory / "snapshots.db")) as store:
        found = {
            each.name: [each.kind.value, each.labels["a"]] for each in store.find()
        }
        store.add("later", "", Kind.ACTIVE, {"a": "b"})
        store.remove("later")
    return found


@pytest.mark.parametrize(
    ("what", "look"),
    [
        ("images", look_at_images),
        ("volumes", look_at_volumes),
        ("snapshots", look_at_snapshots),
    ],
)
def test_what_was_acknowledged_is_there(
    sanitized_build: Path,
    tmp_path: Path,
    what: str,
    look: Callable[[Path], dict[str, Any]],
) -> None:
    directory, materials, log = (tmp_path / x for x in ("it", "materials", "log"))
    directory.mkdir(mode=0o700)
    make_materials(what, materials, tmp_path)
    done = subprocess.run(
        [sys.executable, CHILD, what, directory, materials, str(THINGS), "7"],
        env={
            **os.environ,
            "LD_PRELOAD": str(sanitized_build / "csrc/tests/write-log.so"),
            "WRITE_LOG": str(log),
            "WRITE_LOG_DIR": str(directory),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    #: What there is after so many answers. Whether an image is pinned is not compared.
    after = [{}, *map(json.loads, done.stdout.splitlines())]
    if what == "images":
        after = [{name: x[0] for name, x in each.items()} for each in after]
    operations = read_log(log)
    assert sum(operation.kind == SYNC for operation in operations) > THINGS
    # Python flushes its standard output as well when it starts, and when it ends.
    started = next(n for n, each in enumerate(operations) if each.kind != ANSWER)
    checked = present = 0
    lost = tmp_path / "lost"
    some = STATES_MIN // len(operations) + 1
    chances = random.Random(7)
    for state in states(operations, some=some, seed=7):
        if chances.random() > LOOKED_AT:
            continue
        lay_out(state, lost)
        found = look(lost)
        # One thing may be under way.
        done_things = max(0, min(state.answers - started, THINGS))
        may_be = after[done_things : done_things + 2]
        for name in {*found, *may_be[0]}:
            values = [each.get(name) for each in may_be]
            assert found.get(name) in values, (state, name, values)
        checked += 1
        present += len(found)
    assert checked >= 0.8 * LOOKED_AT * STATES_MIN and 2 * present > checked
