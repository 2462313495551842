"""A path that root names lies in a directory of another user's, who has a link there,
mounts of a user namespace, or an exchange of names.

What is root's elsewhere never changes, and nothing of it gets out. Commands may fail.
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.attacker import (
    _CLONE_NEWNS,
    _CLONE_NEWUSER,
    _LIBC,
    UID,
    attacking,
    exchange,
)
from support.devices import new_btrfs
from support.images import tagged_image
from support.needs import Need

from btrfs_ublk.base.capabilities import FUSE
from btrfs_ublk.cli.main import command
from btrfs_ublk.containers.service import serving
from btrfs_ublk.device.state import RUN_VARIABLE
from btrfs_ublk.units import MIB

pytestmark = pytest.mark.fuse

_MS_BIND = 4096
SECRET = b"what only root may read"
DESCRIPTION = (
    '{"version": 1, "size": 8192, "segments":'
    ' [{"kind": "pattern", "offset": 0, "length": 8192}]}'
)


def run(*words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])


Verb = Callable[[Path, Path], object]


def _state_directory(path: Path, things: Path) -> None:
    before = os.environ[RUN_VARIABLE]
    os.environ[RUN_VARIABLE] = str(path)
    try:
        run("device", "up", "d", things / "description", "--front-end=fuse")
        run("device", "down", "d")
    finally:
        os.environ[RUN_VARIABLE] = before


def _volumes(path: Path, things: Path) -> None:
    base = ("--base", path)
    up = ("up", "one", "--size=1G", "--writable=256M", "--front-end=fuse")
    run("volume", *up, "--mount", things / "mnt", *base)
    run("volume", "down", "one", *base)
    run("volume", "remove", "one", "--yes", *base)


def _cache(path: Path, things: Path) -> None:
    run("cache", "limit", "-d", path, "--max=64M")
    run("cache", "pin", "-d", path, "ab" * 32)
    run("cache", "prune", "-d", path, "--to=0")
    run("cache", "verify", "-d", path)


def _images(path: Path, things: Path) -> None:
    run("image", "gc", "--base", path)
    run("image", "list", "--base", path)


def _layout(path: Path, things: Path) -> None:
    source = f"oci:{things}/ordinary:app"
    run("image", "build", source, "-o", path, "--tag=1", "--threads=1")
    run("image", "index", source, "-o", path, "--tag=2")


def _snapshots(path: Path, things: Path) -> None:
    with serving(path, things / "socket"):
        pass


def _store(path: Path, things: Path) -> None:
    run("podman", "setup", "--store", path)
    run("podman", "list", "--store", path)


def _file(*words: str) -> Verb:
    def verb(path: Path, things: Path) -> None:
        run(*(word.format(path=path, things=things) for word in words))

    return verb


DIRECTORIES: dict[str, Verb] = {
    "state directory": _state_directory,
    "volumes": _volumes,
    "cache": _cache,
    "images": _images,
    "layout": _layout,
    "snapshots": _snapshots,
    "podman store": _store,
}
FILES: dict[str, Verb] = {
    "seed": _file("seed", "create", "{path}", "--virtual-data-size=1G"),
    "tar": _file("image", "export", "oci:{things}/sealed:1", "-o", "{path}"),
    "nginx": _file(
        *("site-cache", "config", "--nodes=127.0.0.1", "--origin=https://h.example"),
        *("--resolver=127.0.0.1", "-o", "{path}"),
    ),
}


def look(top: Path) -> dict[str, object]:
    """Describe a tree, all that may be changed of it."""
    found: dict[str, object] = {}
    for path in (top, *sorted(top.rglob("*"))):
        about = path.lstat()
        is_file = stat.S_ISREG(about.st_mode) and about.st_size < MIB
        data = path.read_bytes() if is_file else b""
        found[str(path)] = (about.st_mode, about.st_uid, about.st_ino, data)
    return found


@pytest.fixture
def victim(sparse_path: Path) -> Path:
    """A directory that only root may enter, with files of several names."""
    top = sparse_path / "victim"
    (top / "devices").mkdir(parents=True)
    for name in ("kept", "devices/kept", "index.json", "limits", "pins"):
        (top / name).write_bytes(SECRET)
    top.chmod(0o700)
    return top


@pytest.fixture
def things(need: Need, sparse_path: Path, name: str) -> Path:
    """What commands need besides."""
    need(FUSE)
    top = sparse_path / "things"
    top.mkdir()
    (top / "description").write_text(DESCRIPTION)
    (top / "mnt").mkdir()
    if name in ("tar", "layout"):
        ordinary = tagged_image(top / "ordinary", {"file": bytes(5000)})
        done = run("image", "build", ordinary, "-o", top / "sealed", "--tag=1")
        assert done.exit_code == 0, done.output
    return top


@pytest.fixture
def home(sparse_path: Path, name: str) -> Iterator[Path]:
    """The other user's directory; in a btrfs, where snapshots need one."""
    with ExitStack() as stack:
        top = sparse_path
        if name == "snapshots":
            top = stack.enter_context(new_btrfs(sparse_path, size_bytes=1 << 30))
        home = top / "home"
        home.mkdir()
        os.chown(home, UID, UID)
        yield home


def _mount_in_namespace() -> None:
    """Have mounts over the name and the directory, which nobody else is to see."""
    if not _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {UID} 1")
    for name in (b"path", b"."):
        _LIBC.mount(b"none", name, b"tmpfs", 0, None)
        _LIBC.mount(b"/etc", name, None, _MS_BIND, None)


def check_nothing_got_out(home: Path) -> None:
    for path in home.rglob("*"):
        with suppress(FileNotFoundError):
            if stat.S_ISREG(path.lstat().st_mode):
                with path.open("rb") as file:
                    assert SECRET not in file.read(MIB), path


@pytest.mark.parametrize("name", [*DIRECTORIES, *FILES])
def test_a_link(name: str, home: Path, victim: Path, things: Path) -> None:
    verb = (DIRECTORIES | FILES)[name]
    target = victim if name in DIRECTORIES else victim / "kept"
    (home / "path").symlink_to(target)
    os.chown(home / "path", UID, UID, follow_symlinks=False)
    before = look(victim)
    _try(verb, home / "path", things)
    assert look(victim) == before
    check_nothing_got_out(home)


# Root chooses where a layout is: docs/design/threat-model.md
@pytest.mark.parametrize("name", [*sorted({*DIRECTORIES, *FILES} - {"layout"})])
def test_names_that_change_places(
    name: str, home: Path, victim: Path, things: Path
) -> None:
    verb = (DIRECTORIES | FILES)[name]
    target = victim if name in DIRECTORIES else victim / "kept"
    (home / "link").symlink_to(target)
    os.chown(home / "link", UID, UID, follow_symlinks=False)
    before = look(victim)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(attacking(home, exchange("path", "link")))
        for _ in range(3):
            _try(verb, home / "path", things)
    assert look(victim) == before
    check_nothing_got_out(home)


@pytest.mark.parametrize("name", ["state directory", "seed"])
def test_mounts_of_a_user_namespace(
    name: str, home: Path, victim: Path, things: Path
) -> None:
    """They stay there: what root makes is in the directory that it has named, or is
    refused as that is another user's."""
    before = look(victim)
    with attacking(home, _mount_in_namespace):
        _try((DIRECTORIES | FILES)[name], home / "path", things)
    assert look(victim) == before
    found = {path.name for path in home.iterdir()}
    assert found == ({"path"} if name == "seed" else set())


def _try(verb: Verb, path: Path, things: Path) -> None:
    try:
        verb(path, things)
    except Exception as error:
        assert not isinstance(error, AssertionError), error
