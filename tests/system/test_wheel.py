"""The wheel and the source distribution; and a project that uses the wheel."""

import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.installed import (  # noqa: F401
    example,
    install_with_network,
    place,
    python,
    run_outside,
    wheel,
)
from support.needs import Need
from support.paths import PROJECT
from support.system_state import SystemState

import btrfs_ublk
from btrfs_ublk.base.capabilities import FUSE
from btrfs_ublk.base.helpers import SERVER

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]
_OPTIONS = ("-ra", "-p", "no:cacheprovider")


def test_the_wheel_has_what_it_should(wheel: Path) -> None:  # noqa: F811
    """All modules, helpers that can be executed, units, the licence; nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    modules = {name for name in files if name.endswith(".py")}
    package = PROJECT / "btrfs_ublk"
    assert modules == {str(path.relative_to(PROJECT)) for path in package.rglob("*.py")}
    assert files[f"btrfs_ublk/libexec/{SERVER}"] & 0o111
    assert {"btrfs_ublk/py.typed", "btrfs_ublk/systemd/btrfs-ublk@.service"} <= set(
        files
    )
    info = f"btrfs_ublk-{btrfs_ublk.__version__}.dist-info/"
    assert f"{info}licenses/LICENSE" in files
    assert {name.partition("/")[0] + "/" for name in files} == {"btrfs_ublk/", info}
    assert not [name for name in files if "__pycache__" in name]


def test_the_source_distribution_has_what_it_should(tmp_path: Path) -> None:
    """What git has, so that a wheel can be built of it; and the metadata are whole."""
    if not (PROJECT / ".git").exists():
        pytest.skip("does not apply: unpacked from an archive")
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation"]
    bin_directory = str(Path(sys.executable).parent)
    path = {"PATH": f"{bin_directory}:/usr/sbin:/usr/bin:/sbin:/bin"}
    run_outside([*build, "--outdir", tmp_path, PROJECT], **path)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run_outside(
        ["git", "-C", PROJECT, "ls-tree", "-r", "--name-only", "HEAD"]
    )
    assert names - {""} == {*tracked.splitlines(), "PKG-INFO"}
    run_outside([sys.executable, "-m", "twine", "check", "--strict", made])


def test_it_runs_where_it_is_installed(python: Path) -> None:  # noqa: F811
    """Without a compiler, and without anything of a developer's."""
    said = run_outside(
        [python.with_name("btrfs-ublk"), "--version"], PATH="/usr/sbin:/usr/bin"
    )
    assert f"btrfs-ublk {btrfs_ublk.__version__}\n" in said
    assert re.search(r"^ *helpers +(\d+) of \1 of this version$", said, re.M), said
    seed = python.parent / "seed.img"
    command: list[str | Path] = [python.with_name("btrfs-ublk"), "seed", "create", seed]
    run_outside([*command, "--virtual-data-size", "1T", "--metadata-only"])
    shown = run_outside(
        [python.with_name("btrfs-ublk"), "seed", "inspect", "--json", seed]
    )
    assert json.loads(shown)
    packages = run_outside([python, "-m", "pip", "list", "--format=freeze"])
    assert not re.search(r"^(meson|jinja2)", packages, re.M)


@pytest.mark.device
def test_the_example_project_passes(
    python: Path,  # noqa: F811
    example: Path,  # noqa: F811
    need: Need,
    state_of_system: Callable[[], SystemState],
) -> None:
    need(FUSE)
    before = state_of_system()
    command: list[str | Path] = [python, "-m", "pytest", *_OPTIONS]
    said = run_outside([*command, "--btrfs-ublk-front-end=fuse"], cwd=example)
    assert re.search(r"\b8 passed\b", said), said
    assert state_of_system() == before


@pytest.mark.vm
def test_the_example_project_passes_with_ublk(
    python: Path, example: Path  # noqa: F811  # noqa: F811
) -> None:
    """In a guest, with the wheel's own helpers."""
    host_only = ("BTRFS_UBLK_HELPERS", "BTRFS_UBLK_RUN_DIR", "PYTHONPATH")
    command: list[str | Path] = [
        *(PROJECT / "scripts" / "vm", "--memory", "2G", "--timeout", "400", "--"),
        *("env", *(f"--unset={name}" for name in host_only)),
        *(python, "-m", "pytest", *_OPTIONS, "--btrfs-ublk-front-end=ublk"),
    ]
    said = run_outside(command, cwd=example, timeout_s=500)
    assert re.search(r"\b8 passed\b", said), said
