"""What a machine does until its power goes, and what was promised to its user then.

`Promises` is the list of what commands and syncs have acknowledged, by the position in
the log of the disk's writes; `Work` is the work, by chance: volumes, their files, an
image, its forks, and snapshots for containers.
"""

import hashlib
import mmap
import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.registry import Registry

from btrfs_ublk.containers.snapshots import MODE, Snapshots
from btrfs_ublk.image import parse_name
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.pull import pull_image
from btrfs_ublk.image.reference import Reference
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.kernel.btrfs import commit_transaction
from btrfs_ublk.units import GIB, KIB, MIB, TIB
from btrfs_ublk.volume import (
    VolumeDefinition,
    VolumeFile,
    add_tree,
    apply_delta,
    down_volume,
    fork_image,
    remove_volume,
    resize_volume,
    unfork_image,
    up_volume,
    write_delta,
)

MAIN, IMAGE, CONTAINERS = "main", "image", "containers"
VOLUMES = (MAIN, IMAGE, CONTAINERS)
LAZY_BYTES, UNIT_BYTES = 256 * KIB, 16 * KIB
#: What an event makes of a key: ("volume", "main"), say. A key has one value, or None.
Key = tuple[str, ...]
#: Any value, as what is under way is not done as a whole.
ANY = "any"


@dataclass(frozen=True)
class Event:
    """``values`` hold when the position ``done``, in bytes of the log, is reached; from
    ``begun`` on they may. Until then a file that is not ``whole`` may be anything."""

    begun: int
    done: int
    values: dict[Key, Any]
    whole: bool


def known(value: Any) -> Any:
    """Return what is remembered of a value: of bytes, their digest."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes {hashlib.sha256(value).hexdigest()}"
    return value


class Promises:
    def __init__(self, position: Callable[[], int]) -> None:
        self._position = position
        self._events: list[Event] = []
        #: What holds now.
        self.now: dict[Key, Any] = {}

    @contextmanager
    def event(self, values: dict[Key, Any], *, whole: bool = True) -> Iterator[None]:
        """Promise these values when the block has ended."""
        values = {key: known(value) for key, value in values.items()}
        begun = self._position()
        yield
        self._events.append(Event(begun, self._position(), values, whole))
        self.now |= values

    def allowed(self, position: int) -> dict[Key, list[Any]]:
        """Return which values each key may have after a loss at this position."""
        keys = [key for event in self._events for key in event.values]
        found: dict[Key, list[Any]] = {key: [None] for key in keys}
        for event in self._events:
            for key, value in event.values.items():
                if event.done <= position:
                    found[key] = [value]
                elif event.begun < position:
                    found[key] += [value] if event.whole else [value, ANY]
        return found


class Work:
    """Work with volumes, which are mounted in ``mounts``; ``source`` is a directory
    with the files that they get their content from."""

    def __init__(
        self,
        mounts: Path,
        source: Path,
        registry: Registry,
        promises: Promises,
        chances: random.Random,
    ) -> None:
        self._mounts, self._source, self._chances = mounts, source, chances
        self._registry, self._promises = registry, promises
        self._access = RegistryAccess(ca_file=registry.ca_file)
        self._number = 0
        self._definitions: dict[str, VolumeDefinition] = {}

    def run(self, steps: int) -> None:
        """Do so many things, of each kind one first, and take down what is up."""
        self._up(MAIN)
        self._up(CONTAINERS)
        self._pull("app:1")
        self._up(IMAGE)
        kinds: list[tuple[Callable[[], None], int]] = [
            (self._write, 6),
            (self._replace, 4),
            (self._write_many, 2),
            (self._write_unsynced, 4),
            (self._change, 4),
            (self._remove_file, 2),
            (self._read_lazily, 2),
            (self._add_file, 1),
            (self._resize, 1),
            (self._down_and_up, 1),
            (self._other_volume, 2),
            (self._pull_or_collect, 2),
            (self._fork_or_unfork, 3),
            (self._apply_delta, 1),
            (self._add_tree, 2),
            (self._snapshot, 4),
        ]
        for step in range(steps):
            # Each kind once, and then by chance.
            if step < len(kinds):
                kinds[step][0]()
            else:
                calls, weights = zip(*kinds, strict=True)
                self._chances.choices(calls, weights)[0]()
        for name in list(self._definitions):
            down_volume(name)

    def definition(self, name: str) -> VolumeDefinition:
        """Return how a volume was defined first."""
        if name == IMAGE:
            return VolumeDefinition(
                image=f"{self._registry.host}/app:1",
                image_ca_file=self._registry.ca_file,
                writable_bytes=GIB,
                mount=self._mounts / name,
            )
        lazy = ("same", "other") if name == MAIN else ()
        return VolumeDefinition(
            size_bytes=TIB,
            writable_bytes=256 * MIB,
            mount=self._mounts / name,
            files=tuple(VolumeFile(each, self._lazy_source(each)) for each in lazy),
        )

    def _lazy_source(self, name: str) -> dict[str, Any]:
        return {"kind": "file", "path": str(self._source / name), "unit": UNIT_BYTES}

    def _next(self) -> str:
        self._number += 1
        return str(self._number)

    def _known(self, *start: str) -> list[Key]:
        """Return the keys that begin so and have a value."""
        return [
            key
            for key, value in self._promises.now.items()
            if key[: len(start)] == start and value is not None
        ]

    # Volumes.

    def _up(self, name: str) -> None:
        definition = self._definitions.get(name) or self.definition(name)
        values: dict[Key, Any] = {
            ("volume", name): True,
            ("writable", name): definition.writable_bytes,
        }
        with self._promises.event(values):
            up_volume(name, definition)
        self._definitions[name] = definition

    def _down_and_up(self) -> None:
        name = self._chances.choice(VOLUMES)
        down_volume(name)
        self._up(name)

    def _other_volume(self) -> None:
        others = [name for name in self._definitions if name not in VOLUMES]
        if not others:
            self._up(f"other-{self._next()}")
            return
        (name,) = others
        del self._definitions[name]
        down_volume(name)
        with self._promises.event({("volume", name): None, ("writable", name): None}):
            remove_volume(name)

    def _resize(self) -> None:
        before = self._definitions[MAIN]
        after = before.writable_bytes + 16 * MIB
        with self._promises.event({("writable", MAIN): after}):
            resize_volume(MAIN, after)
        keys = {f: getattr(before, f) for f in ("size_bytes", "mount", "files")}
        self._definitions[MAIN] = VolumeDefinition(writable_bytes=after, **keys)

    def _add_file(self) -> None:
        before, name = self._definitions[MAIN], f"lazy-{self._next()}"
        file = VolumeFile(name, self._lazy_source("same"))
        keys = {f: getattr(before, f) for f in ("size_bytes", "mount")}
        after = VolumeDefinition(
            writable_bytes=before.writable_bytes, files=(*before.files, file), **keys
        )
        content = (self._source / "same").read_bytes()
        with self._promises.event({("file", MAIN, name): content}):
            up_volume(MAIN, after)
        self._definitions[MAIN] = after

    def _read_lazily(self) -> None:
        """Read a unit of a source that has other content after the loss."""
        unit = self._chances.randrange(LAZY_BYTES // UNIT_BYTES)
        with open(self._mounts / MAIN / "other", "rb") as file:
            with self._promises.event({("unit", str(unit)): True}):
                file.seek(unit * UNIT_BYTES)
                file.read(UNIT_BYTES)

    # Files.

    def _places(self) -> list[tuple[str, str]]:
        """Return where there can be files: volumes, and directories in them."""
        forks = [(IMAGE, f"forks/{key[2]}") for key in self._known("fork")]
        return [(MAIN, "."), *forks]

    def _content(self) -> bytes:
        return self._chances.randbytes(
            self._chances.choice([10, 3000, 50_000, 300_000])
        )

    def _write(self) -> None:
        volume, directory = self._chances.choice(self._places())
        name = os.path.normpath(f"{directory}/new-{self._next()}")
        content = self._content()
        with self._promises.event({("file", volume, name): content}, whole=False):
            write_synced(self._mounts / volume / name, content)

    def _replace(self) -> None:
        files = self._known("file")
        files = [key for key in files if "lazy" not in key[2]]
        if not files:
            self._write()
            return
        key = self._chances.choice(files)
        path, content = self._mounts / key[1] / key[2], self._content()
        new = path.with_name(f".{path.name}.new")
        with self._promises.event({key: content}):
            write_synced(new, content)
            new.replace(path)
            _sync(path.parent)

    def _write_many(self) -> None:
        """Write files, and sync all of the file system."""
        volume, directory = self._chances.choice(self._places())
        top = os.path.normpath(f"{directory}/many-{self._next()}")
        values: dict[Key, Any] = {
            ("file", volume, f"{top}/{number}"): b"%d\n" % number * number
            for number in range(50)
        }
        with self._promises.event(values, whole=False):
            (self._mounts / volume / top).mkdir()
            for key, content in values.items():
                (self._mounts / volume / key[2]).write_bytes(content)
            commit_transaction(self._mounts / volume)

    def _write_unsynced(self) -> None:
        """Write what nobody has promised, so that much is under way."""
        volume, directory = self._chances.choice(self._places())
        path = self._mounts / volume / directory / f"unsynced-{self._next()}"
        path.write_bytes(self._chances.randbytes(self._chances.randrange(3 * MIB)))

    def _change(self) -> None:
        """Change files in place: by mappings, truncation, appending."""
        files = [key for key in self._known("file") if "lazy" not in key[2]]
        if not files:
            self._write()
            return
        key = self._chances.choice(files)
        path = self._mounts / key[1] / key[2]
        length = self._chances.randrange(path.stat().st_size + 1)
        with path.open("rb") as file:
            kept = file.read(length)
        mapped = self._chances.randbytes(length // 2)
        content = mapped + kept[len(mapped) :] + self._content()
        with (
            self._promises.event({key: content}, whole=False),
            path.open("r+b") as file,
        ):
            file.truncate(length)
            file.seek(length)
            file.write(content[length:])
            file.flush()
            with mmap.mmap(file.fileno(), 0) as mapping:
                mapping[: len(mapped)] = mapped
            os.fsync(file.fileno())

    def _remove_file(self) -> None:
        if files := self._known("file"):
            key = self._chances.choice(files)
            path = self._mounts / key[1] / key[2]
            with self._promises.event({key: None}):
                path.unlink()
                _sync(path.parent)

    # Images.

    def _pull(self, name: str, *, pinned: bool = False) -> None:
        full = f"{self._registry.host}/{name}"
        reference = parse_name(full)
        assert isinstance(reference, Reference)
        with self._promises.event({("image", full): True}):
            pull_image(reference, self._access, ImageStore(), pinned=pinned)

    def _pull_or_collect(self) -> None:
        images = self._known("image")
        if len(images) < 2:
            self._pull(self._chances.choice(["app:1", "app:2"]), pinned=True)
            return
        key = self._chances.choice(images)
        ImageStore().pin(key[1], pinned=False)
        gone = [x for x in ImageStore().images() if not x.pinned]
        with self._promises.event(
            {("image", name): None for x in gone for name in x.names}
        ):
            ImageStore().collect(())

    def _fork_or_unfork(self) -> None:
        forks = self._known("fork")
        if len(forks) < 2 or self._chances.random() < 0.5:
            name = f"fork-{self._next()}"
            mode: Any = self._chances.choice(["snapshot", "overlay"])
            with self._promises.event({("fork", IMAGE, name): mode}):
                fork_image(IMAGE, name, mode=mode)
            return
        key = self._chances.choice(forks)
        inside = self._known("file", IMAGE)
        files = [each for each in inside if each[2].startswith(f"forks/{key[2]}/")]
        with self._promises.event(dict.fromkeys([key, *files])):
            unfork_image(IMAGE, key[2])

    def _apply_delta(self) -> None:
        """Make a fork that has what another one has."""
        forks = self._known("fork")
        if not forks:
            self._fork_or_unfork()
            return
        name, number = self._chances.choice(forks)[2], self._next()
        delta, new = self._source / f"delta-{number}", f"applied-{number}"
        write_delta(IMAGE, name, delta)
        mode = self._promises.now["fork", IMAGE, name]
        values: dict[Key, Any] = {("fork", IMAGE, new): mode}
        for key in self._known("file", IMAGE):
            if key[2].startswith(f"forks/{name}/"):
                path = key[2].replace(name, new, 1)
                values["file", IMAGE, path] = self._promises.now[key]
        with self._promises.event(values):
            apply_delta(IMAGE, delta, new)

    def _add_tree(self) -> None:
        """Make a tree of a directory again in the volume, by clones of its data."""
        tree = self._source / f"tree-{self._next()}"
        values: dict[Key, Any] = {}
        tree.mkdir()
        for name in ("one", "two"):
            content = self._content()
            write_synced(tree / name, content)
            values["file", MAIN, f"{tree.name}/{name}"] = content
        _sync(self._source)
        with self._promises.event(values):
            add_tree(MAIN, tree, tree.name, access=self._access)

    # Snapshots for containers.

    def _snapshot(self) -> None:
        """Commit a layer, make a container on it, or remove one of them."""
        with closing(Snapshots(self._mounts / CONTAINERS / "root")) as snapshots:
            committed = [k[1] for k in self._known("snapshot") if k[1][0] == "c"]
            active = [k[1] for k in self._known("snapshot") if k[1][0] == "a"]
            if active and self._chances.random() < 0.3:
                name = self._chances.choice(active)
                gone = dict.fromkeys([("snapshot", name), ("mode", name)])
                with self._promises.event(gone, whole=False):
                    snapshots.remove(name)
                return
            above = self._chances.choice(["", *committed])
            number = self._next()
            key, name = f"active-{number}", f"committed-{number}"
            labels = {MODE: "overlay"} if above and self._chances.random() < 0.3 else {}
            values: dict[Key, Any] = {("snapshot", key): "active", ("mode", key): 0o755}
            with self._promises.event(values, whole=False), _umask(0o077):
                mounts = snapshots.prepare(key, above, labels)
            if mounts[0].type == "overlay" or self._chances.random() < 0.3:
                return  # a container, which stays
            content = self._content()
            (Path(mounts[0].source) / f"file-{number}").write_bytes(content)
            values = {
                ("snapshot", key): None,
                ("mode", key): None,
                ("mode", name): 0o755,
                ("snapshot", name): "committed",
                ("layer", name, f"file-{number}"): content,
            }
            with self._promises.event(values):
                snapshots.commit(name, key, {})


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
