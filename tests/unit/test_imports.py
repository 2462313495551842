"""What commands import: no more than they need."""

from __future__ import annotations

from pathlib import Path

import pytest
from imports import Starter

from btrfs_ublk.base.process import run

#: What takes long to import, and is wanted by few.
HEAVY = {
    *(
        "asyncio",
        "difflib",
        "http.server",
        "importlib.resources",
        "jinja2",
        "matplotlib",
        "prometheus_client",
    ),
    *("psutil", "pytest", "rich", "sqlite3", "urllib.request"),
    *("cryptography", "requests", "zstandard"),
}
#: How many of our own modules, at most; it is for whoever adds one to say why. The
#: options of registries are among those of volumes, since trees of images are added.
MOST = {"--version": 15, "volume list": 43, "volume up --help": 29}


@pytest.mark.parametrize("command", MOST)
def test_commands_import_what_they_need(command: str, tmp_path: Path) -> None:
    modules = Starter(tmp_path).imported(command).keys()
    ours = [name for name in modules if name.startswith("btrfs_ublk")]
    assert len(ours) <= MOST[command], ours
    assert not modules & HEAVY
    assert len(modules) <= 200
    assert not [name for name in ours if name.startswith("btrfs_ublk.bench")]


#: What takes long to import, and is for volumes with files or caches, if at all.
UNUSED = {
    *("_hashlib", "sqlite3", "btrfs_ublk.server.block_server"),
    *("btrfs_ublk.content.cache", "btrfs_ublk.content.maps", "btrfs_ublk.server.stats"),
}


@pytest.mark.parametrize(
    ("module", "unused"),
    [
        ("btrfs_ublk.volume.up", UNUSED | {"btrfs_ublk.supervision.supervisor"}),
        (
            "btrfs_ublk.volume.down",
            UNUSED
            | {"btrfs_ublk.base.capabilities", "btrfs_ublk.supervision.supervisor"}
            | {"btrfs_ublk.server.description", "btrfs_ublk.volume.make", "tempfile"},
        ),
        (
            "btrfs_ublk.supervision.daemon",
            UNUSED | {"btrfs_ublk.base.capabilities", "btrfs_ublk.server.description"},
        ),
    ],
)
def test_volumes_import_what_they_need(
    module: str, unused: set[str], tmp_path: Path
) -> None:
    argv = Starter(tmp_path).argv(None)
    argv[-1] = f"import sys, {module}; print(*sys.modules)"
    assert not unused & set(run(argv, timeout_s=60.0).stdout.split())


def test_a_snapshotter_starts_without_what_asks_registries(tmp_path: Path) -> None:
    """New containers wait for its start after a kill."""
    pytest.importorskip("grpc")
    argv = Starter(tmp_path).argv(None)
    argv[-1] = "import sys, btrfs_ublk.containers.service; print(*sys.modules)"
    loaded = set(run(argv, timeout_s=60.0).stdout.split())
    assert not loaded & {"cryptography", "requests", "urllib3"}
