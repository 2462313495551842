"""The how-tos: every command in them is run, and prints what they say."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Need
from device_support import remove_all
from podman_support import PODMAN, PRIVATE, place_for_state
from registry_server import REGISTRY
from s3_server import WEED
from transcript import PROJECT, Step, replay_steps, session, steps
from web_server import NGINX

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, Capability, Program
from btrfs_ublk.base.process import run
from btrfs_ublk.kernel.temporary import loops_below

_DOCUMENTS = sorted((PROJECT / "docs" / "how-to").glob("*.md"))
_VM = "vm.md"
_NEEDED: dict[str, tuple[Capability, ...]] = {
    "images.md": (REGISTRY, Program("skopeo", "skopeo"), Program("busybox", "busybox")),
    "ci.md": (REGISTRY, Program("busybox", "busybox"), PODMAN),
    "podman.md": (REGISTRY, Program("busybox", "busybox"), PODMAN),
    "registry-and-s3.md": (REGISTRY, WEED),
    "site-caches.md": (NGINX,),
}


def _environment(root: Path) -> dict[str, str]:
    temporary = root / "tmp"  # other people's programs leave files there
    temporary.mkdir()
    return {
        "TMPDIR": str(temporary),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(root),
        "BTRFS_UBLK_VOLUMES_DIR": str(root / "volumes"),
        "BTRFS_UBLK_IMAGES_DIR": str(root / "images"),
    }


@pytest.fixture(autouse=True)
def nothing_of_a_failure(sparse_path: Path) -> Iterator[None]:
    """A document that is wrong must not leave devices to those that follow."""
    yield
    remove_all()
    for device, _file in loops_below(sparse_path):
        run(["losetup", "--detach", device], timeout_s=10)


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [x for x in _DOCUMENTS if x.name != _VM and steps(x)],
    ids=lambda path: path.stem,
)
def test_it_does_what_it_says(document: Path, sparse_path: Path, need: Need) -> None:
    need(ROOT, BTRFS, LOOP, FUSE, *_NEEDED.get(document.name, ()))
    directory = sparse_path / "work"
    directory.mkdir()
    output = sparse_path / "printed"
    with (
        place_for_state(),
        session(directory, output, environment=_environment(sparse_path)) as shell,
    ):
        if document.name in ("ci.md", "podman.md"):
            private = Step(0, f"cd {sparse_path}\n{PRIVATE}\ncd {PROJECT}", "")
            replay_steps(document, [private], shell)
        replay_steps(document, steps(document), shell)


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_machine_of_its_own(sparse_path: Path, need: Need) -> None:
    need(ROOT)
    output = sparse_path / "printed"
    document = PROJECT / "docs" / "how-to" / _VM
    with session(PROJECT, output, isolated=False) as shell:
        replay_steps(document, steps(document), shell, timeout_s=250)
