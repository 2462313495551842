"""Keeps records in a directory, by chance, until it has done so many things.

Arguments: what (images, volumes or snapshots), the directory, one with materials, the
number of things, a seed. After each, standard output is flushed by the C library, as
the log of writes has it, and a line of JSON says what the records are then. The first
thing always writes something.
"""

import ctypes
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from btrfs_ublk import seed as seeds
from btrfs_ublk.containers.store import Kind, SnapshotStore
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.kernel.new_file import write_new
from btrfs_ublk.units import MIB
from btrfs_ublk.volume.definition import VolumeDefinition
from btrfs_ublk.volume.store import (
    MadeFile,
    Session,
    VolumeDirectory,
    discard,
    open_or_make,
    remove_halves,
    volumes_directory,
)

Values = dict[str, Any]
_NAMES = ("one", "two", "three")
#: The connection is made anew after so many changes, which empties the log.
_REOPENED_AFTER = 7


def images(directory: Path, materials: Path, some: random.Random) -> Iterator[Values]:
    """What is pulled by which name, and whether it is pinned."""
    store, values = ImageStore(directory), Values()
    while True:
        what = some.choice(["add", "add", "pin", "collect"]) if values else "add"
        name = f"registry.test/{some.choice(_NAMES)}:1"
        if what == "add":
            material = some.choice(sorted(materials.iterdir()))
            with store.adding() as new:
                write_new(new / "pack", (material / "pack").read_bytes(), synced=True)
                digest = store.add(new, (material / "manifest.json").read_bytes())
            store.name(name, digest)
            values[name] = [digest, values.get(name, [None, False])[1]]
        elif what == "pin" and name in values:
            values[name] = [values[name][0], not values[name][1]]
            store.pin(name, pinned=values[name][1])
        elif what == "collect":
            store.collect(())
            kept = {digest for digest, pinned in values.values() if pinned}
            values = {name: each for name, each in values.items() if each[0] in kept}
        yield values


def volumes(directory: Path, materials: Path, some: random.Random) -> Iterator[Values]:
    """The size and the files of each volume."""
    base, values = volumes_directory(directory, make=True), Values()
    seed = seeds.parse_report((materials / "seed.json").read_text())

    def make(half: VolumeDirectory) -> tuple[seeds.Seed, None]:
        half.seed_image.write_bytes(b"seed" * 1024)
        return replace(seed, path=half.seed_image), None

    while True:
        name = some.choice(_NAMES)
        volume = VolumeDirectory(base / name)
        remove_halves(base)
        if name not in values:
            size = some.randrange(256, 300) * MIB
            definition = VolumeDefinition(writable_bytes=size)
            open_or_make(volume, definition, make)[0].close()
            values[name] = [size, []]
        elif some.random() < 0.3:
            with volume.locked():
                discard(volume)
            del values[name]
        elif some.random() < 0.3:
            volume.write_session(
                Session(boot_id="boot", target="/mnt", made_target=False)
            )
        elif some.random() < 0.5:
            size = values[name][0] + MIB
            volume.write_definition(VolumeDefinition(writable_bytes=size))
            values[name] = [size, values[name][1]]
        else:
            files = volume.files()
            path = f"file-{len(files)}"
            files[path] = MadeFile(
                path=path, source={"kind": "x"}, offset=0, size_bytes=1, is_whole=True
            )
            volume.write_files(files)
            values[name] = [values[name][0], sorted(files)]
        yield values


def snapshots(
    directory: Path, _materials: Path, some: random.Random
) -> Iterator[Values]:
    """The kind of each snapshot, and a label."""
    values, number = Values(), 0
    while True:
        with closing(SnapshotStore(directory / "snapshots.db")) as store:
            for _ in range(_REOPENED_AFTER):
                number += 1
                active = [name for name in values if name.startswith("active")]
                if active and some.random() < 0.4:
                    name = some.choice(active)
                    store.commit(f"done-{number}", name, {"a": str(number)}, number)
                    del values[name]
                    values[f"done-{number}"] = ["committed", str(number)]
                elif active and some.random() < 0.3:
                    name = some.choice(active)
                    store.remove(name)
                    del values[name]
                else:
                    labels = {"a": "b" * some.choice([1, 5000])}
                    store.add(f"active-{number}", "", Kind.ACTIVE, labels)
                    values[f"active-{number}"] = ["active", labels["a"]]
                yield values


def main(what: str, directory: str, materials: str, count: str, seed: str) -> None:
    known: dict[str, Callable[..., Iterator[Values]]] = {
        "images": images,
        "volumes": volumes,
        "snapshots": snapshots,
    }
    library = ctypes.CDLL(None)
    stdout = ctypes.c_void_p.in_dll(library, "stdout")
    does = known[what](Path(directory), Path(materials), random.Random(int(seed)))
    for _, values in zip(range(int(count)), does, strict=False):
        library.fflush(stdout)
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
