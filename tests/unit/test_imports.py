"""What commands import: no more than they need."""

import os
import sys
from pathlib import Path

import click
import pytest
from support.paths import PROJECT

from btrfs_ublk.base.process import run

#: What takes long to import, and is wanted by few.
HEAVY = {
    *(
        "asyncio",
        "difflib",
        "http.server",
        "importlib.resources",
        "jinja2",
        "prometheus_client",
    ),
    *("psutil", "pytest", "rich", "sqlite3", "urllib.request"),
    *("cryptography", "requests", "zstandard"),
}
#: How many of our own modules, at most. A commit that raises a number says why. The
#: options of registries are among those of volumes, since trees of images are added.
MOST = {
    "--version": 19,
    "volume list": 52,
    "volume up --help": 36,
    "image fork --help": 50,
}


def modules_of(code: str, *words: str, home: Path) -> set[str]:
    """Run code with the package, but without what an editable installation imports."""
    variables = {
        "BTRFS_UBLK_RUN_DIR": str(home / "run"),
        "BTRFS_UBLK_VOLUMES_DIR": str(home / "volumes"),
        "PYTHONPATH": f"{PROJECT}:{Path(click.__file__).parents[1]}",
    }
    said = "print(*sys.modules, file=sys.stderr)"
    code = f"import atexit, sys; atexit.register(lambda: {said}); {code}"
    argv = [sys.executable, "-S", "-P", "-c", code, *words]
    done = run(argv, timeout_s=60.0, env=os.environ | variables)
    return set(done.stderr.split()) - {"atexit"}


@pytest.mark.parametrize("command", MOST)
def test_commands_import_what_they_need(command: str, tmp_path: Path) -> None:
    code = "from btrfs_ublk.cli.main import command; command()"
    modules = modules_of(code, *command.split(), home=tmp_path)
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
        # The registry is asked, and a daemon started, before these are imported.
        (
            "btrfs_ublk.volume.begin",
            UNUSED
            | {"btrfs_ublk.supervision.client", "btrfs_ublk.volume.up"}
            | {"btrfs_ublk.device.lifecycle", "btrfs_ublk.volume.sprout"},
        ),
        (
            "btrfs_ublk.volume.down",
            UNUSED
            | {"btrfs_ublk.base.capabilities", "btrfs_ublk.supervision.supervisor"}
            | {"btrfs_ublk.server.description", "tempfile"},
        ),
        (
            "btrfs_ublk.supervision.daemon",
            UNUSED
            | {"btrfs_ublk.base.capabilities", "btrfs_ublk.server.description"}
            | {"bz2", "lzma", "shutil"},
        ),
        # Many registries want no login.
        ("btrfs_ublk.image.connection", {"btrfs_ublk.image.logins", "shutil"}),
    ],
)
def test_modules_import_what_they_need(
    module: str, unused: set[str], tmp_path: Path
) -> None:
    assert not unused & modules_of(f"import {module}", home=tmp_path)


def test_what_only_asks_the_daemon_imports_nothing_else(tmp_path: Path) -> None:
    modules = modules_of("import btrfs_ublk.command", home=tmp_path)
    ours = {name for name in modules if name.startswith("btrfs_ublk")}
    assert ours == {"btrfs_ublk", "btrfs_ublk.command"}
    assert not modules & {
        "click",
        "dataclasses",
        "json",
        "logging",
        "typing",
        "pathlib",
        "socket",
    }
    words = ["btrfs-ublk", "volume", "list"]
    code = f"sys.argv[:] = {words}; from btrfs_ublk.command import main; main()"
    code = f"import os; os._exit = sys.exit; {code}"
    assert "click" not in modules_of(code, home=tmp_path)


def test_a_snapshotter_starts_without_what_asks_registries(tmp_path: Path) -> None:
    """New containers wait for its start after a kill."""
    pytest.importorskip("grpc")
    loaded = modules_of("import btrfs_ublk.containers.service", home=tmp_path)
    assert not loaded & {"cryptography", "requests", "urllib3"}
