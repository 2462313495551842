"""The wheel and systemd's units, installed below a root."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import PROJECT

from btrfs_ublk.base.process import run
from btrfs_ublk.testing.requirements import do_without

EXAMPLE = PROJECT / "tests" / "system" / "example_project"
_BUILD = PROJECT / "build"
_TIMEOUT_S = 280
#: What pip says where there is no network.
_NO_INDEX = ("NewConnectionError", "No matching distribution", "ConnectTimeout")


def run_outside(
    argv: list[str | Path],
    *,
    cwd: Path = Path("/"),
    timeout_s: float = _TIMEOUT_S,
    **environment: str,
) -> str:
    """What it prints. Fails with that when it fails.

    NB: elsewhere than in the project, whose package Python would find first.
    """
    result = subprocess.run(
        argv,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if result.returncode:
        pytest.fail(f"{argv} ended with {result.returncode}:\n{result.stdout}", False)
    return result.stdout


def install_with_network(
    config: pytest.Config, argv: list[str | Path], **environment: str
) -> None:
    """Fails where that fails; a test does without where there is no network."""
    result = subprocess.run(
        argv,
        cwd="/",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if any(words in result.stderr for words in _NO_INDEX):
        do_without(config, f"a package index: {result.stderr[-300:]}")
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """In the project, which guests of scripts/vm see."""
    _BUILD.mkdir(exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="wheel-", dir=_BUILD))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def wheel(place: Path) -> Path:
    """Built as ``pip wheel`` does it, but for what is compiled already: of that, a copy
    is taken, whose relative paths hold as well.
    """
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    compiled = _BUILD / f"cp{version}"
    directory = _BUILD / f"{place.name}.build"
    if compiled.exists():
        shutil.copytree(compiled, directory, symlinks=True)
    try:
        run_outside(
            [
                *(sys.executable, "-m", "pip", "wheel", PROJECT, "--wheel-dir", place),
                *("--no-deps", "--no-build-isolation", "--quiet"),
                f"-Cbuild-dir=build/{directory.name}",
            ],
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    (made,) = place.glob("*.whl")
    return made


@pytest.fixture(scope="session")
def example(place: Path) -> Path:
    """A copy: an installation leaves files in it."""
    return shutil.copytree(EXAMPLE, place / "example")


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest, wheel: Path, example: Path) -> Path:
    """The interpreter of a new environment, where the wheel and the example are
    installed; there was no compiler on PATH.
    """
    directory = wheel.parent / "venv"
    venv.create(directory, with_pip=True)
    interpreter = directory / "bin" / "python"
    pip = [interpreter, "-m", "pip", "install", "--quiet"]
    install_with_network(
        request.config,
        [*pip, "--disable-pip-version-check", wheel, f"{example}[test]"],
        PATH=str(interpreter.parent),
    )
    return interpreter


_OPERATING = PROJECT / "docs/how-to/operating.md"

_INSTALLED = "/etc/systemd/system"

_RELOAD = "systemctl daemon-reload\n"

COMMAND = Path(sys.executable).with_name("btrfs-ublk")


def install_units(directory: Path) -> None:
    """Install the units as the document has it."""
    (recipe,) = re.findall(r"^```sh\n(.*?)^```", _OPERATING.read_text(), re.M | re.S)
    assert _INSTALLED in recipe and recipe.endswith(_RELOAD)
    recipe = recipe.replace(_INSTALLED, str(directory)).replace(_RELOAD, "true\n")
    path = f"{COMMAND.parent}:{os.environ['PATH']}"
    run(["sh", "-euc", recipe], timeout_s=60, env=os.environ | {"PATH": path})
