"""Packages of distributions: what can be told without building them.

scripts/package builds them; with --check it installs, tries and purges them as well.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest
from support.paths import PROJECT

import btrfs_ublk

_PACKAGING = PROJECT / "packaging"
_CONTROL = (_PACKAGING / "debian/control").read_text()
_SPEC = (_PACKAGING / "btrfs-ublk.spec").read_text()
_SETTINGS = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]


def test_all_are_of_this_version() -> None:
    changelog = (_PACKAGING / "debian/changelog").read_text()
    assert changelog.startswith(f"btrfs-ublk ({btrfs_ublk.__version__}-1) ")
    assert re.findall(r"^Version: *(.*)", _SPEC, re.M) == [btrfs_ublk.__version__]


def test_recipes_need_what_the_project_needs() -> None:
    """The libraries of scripts/setup, and the Python packages of pyproject.toml."""
    library = PROJECT / "scripts/lib/packages.sh"
    said = subprocess.run(
        ["bash", "-euc", f". {library}; packages_of_part build"],
        check=True,
        capture_output=True,
        text=True,
    )
    libraries = {name for name in said.stdout.split() if name.endswith("-dev")}
    needed = set(re.findall(r"^ ([\w+.-]+),$", _CONTROL.partition("\n\n")[0], re.M))
    assert libraries - {"libc6-dev"} == {n for n in needed if n.endswith("-dev")}
    for wanted in _SETTINGS["dependencies"]:
        name, _, version = wanted.partition(">=")
        assert f"python3-{name.replace('_', '-')}" in needed
        assert f"Requires:       python3-{name} >= {version}\n" in _SPEC
    for wanted in _SETTINGS["optional-dependencies"]["containers"]:
        name, _, version = wanted.partition(">=")
        debian = name.lower().replace("pyyaml", "yaml")
        assert f" python3-{debian},\n" in _CONTROL.partition("\nSuggests:\n")[2]
        assert f"Suggests:       python3-{name.lower()} >= {version}\n" in _SPEC


def test_purging_keeps_what_cannot_be_fetched_again(tmp_path: Path) -> None:
    """The .deb's postrm, for a tree below another directory than /."""
    script = (_PACKAGING / "debian/btrfs-ublk.postrm").read_text()
    state = tmp_path / "var/lib/btrfs-ublk"
    for name in ("images/sha256", "volumes/one", "snapshotter/snapshots/1"):
        (state / name).mkdir(parents=True)
    (state / "1.ledger").touch()
    command = re.sub(r" (/(?:run|var)/)", rf" {tmp_path}\1", script)
    assert command.count(str(tmp_path)) == 5
    for action in ("remove", "purge"):
        subprocess.run(["sh", "-c", command, "postrm", action], check=True, timeout=20)
        left = {"snapshotter", "volumes"}
        left |= {"1.ledger", "images"} if action == "remove" else set()
        assert {path.name for path in state.iterdir()} == left
    assert (state / "volumes/one").is_dir()
    assert (state / "snapshotter/snapshots/1").is_dir()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What packaging/install.py puts beside the modules."""
    root = tmp_path_factory.mktemp("root")
    package = root / "usr/lib/python3/dist-packages/btrfs_ublk"
    package.mkdir(parents=True)
    subprocess.run(
        [sys.executable, _PACKAGING / "install.py", root], check=True, timeout=60
    )
    return root


def test_the_distribution_is_as_pip_has_it(installed: Path) -> None:
    (info,) = installed.glob("usr/lib/python3/dist-packages/*.dist-info")
    made, known = PathDistribution(info), Distribution.from_name("btrfs-ublk")
    for field in ("Name", "Version", "Summary", "Requires-Python"):
        assert made.metadata[field] == known.metadata[field]
    assert _points(made) == _points(known)
    # A wheel says as well what developers want.
    assert {_squeezed(each) for each in made.requires or ()} == {
        _squeezed(each)
        for each in known.requires or ()
        if "extra ==" not in each
        or each.endswith(('extra == "containers"', 'extra == "report"'))
    }


def _points(distribution: Distribution) -> set[tuple[str, str, str]]:
    return {(each.group, each.name, each.value) for each in distribution.entry_points}


def _squeezed(requirement: str) -> str:
    return requirement.replace(" ", "").lower()


def test_the_command_and_completions_are_whole(installed: Path) -> None:
    command = installed / "usr/bin/btrfs-ublk"
    said = subprocess.run(
        [sys.executable, command, "--help"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.stdout.startswith("Usage: btrfs-ublk ")
    assert command.stat().st_mode & 0o111 == 0o111
    share = installed / "usr/share"
    bash = share / "bash-completion/completions/btrfs-ublk"
    assert subprocess.run([shutil.which("bash") or "bash", "-n", bash]).returncode == 0
    fish = "fish/vendor_completions.d/btrfs-ublk.fish"
    for path in (fish, "zsh/vendor-completions/_btrfs-ublk"):
        assert "_BTRFS_UBLK_COMPLETE" in (share / path).read_text()
