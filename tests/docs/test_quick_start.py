"""docs/quick-start.md, typed literally in a fresh clone of the repository."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.documents import nothing_of_a_failure  # noqa: F401  (a fixture)
from support.documents import replay_steps, session, steps
from support.needs import Need, inapplicable
from support.paths import PROJECT

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, Program

_DOCUMENT = PROJECT / "docs" / "quick-start.md"
_SETUP_TIMEOUT_S = 900


def test_five_commands_are_enough() -> None:
    """The first block has them all: set up, serve, up, use, down."""
    block = re.search(r"^```console\n(.*?)^```", _DOCUMENT.read_text(), re.M | re.S)
    assert block
    assert len(re.findall(r"^\$ ", block[1], re.M)) <= 5


def test_the_readme_has_the_same() -> None:
    readme = (PROJECT / "README.md").read_text()
    block = re.search(r"^```console\n.*?^```", _DOCUMENT.read_text(), re.M | re.S)
    assert block and block[0] in readme


@pytest.mark.device
@pytest.mark.timeout(1200)
def test_a_fresh_clone(sparse_path: Path, need: Need) -> None:
    need(ROOT, BTRFS, LOOP, FUSE, Program("git", package="git"))
    if not (PROJECT / ".git").exists():
        inapplicable("this is no clone, so there is nothing to clone from")
    clone = sparse_path / "clone"
    subprocess.run(
        # It may belong to another user.
        ["git", "-c", "safe.directory=*", "clone", "--quiet", "--no-local"]
        + [str(PROJECT), str(clone)],
        check=True,
        timeout=60,
    )
    setup, *rest = steps(_DOCUMENT)
    assert setup.command.startswith("scripts/setup")
    # With the network, for packages: the session has none.
    done = subprocess.run(
        ["bash", "-c", setup.command],
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=_SETUP_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    environment = {"BTRFS_UBLK_VOLUMES_DIR": str(sparse_path / "volumes")}
    output = sparse_path / "printed"
    path = os.environ["PATH"]
    with session(clone, output, environment={**environment, "PATH": path}) as shell:
        replay_steps(_DOCUMENT, rest, shell)
