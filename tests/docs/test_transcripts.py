"""The how-tos: every command in them is run, and prints what they say."""

from pathlib import Path

import pytest
from support.containers import PODMAN, PRIVATE, place_for_state
from support.documents import (  # noqa: F401  (a fixture)
    Step,
    _environment,
    nothing_of_a_failure,
    replay_steps,
    session,
    steps,
)
from support.needs import Need
from support.paths import PROJECT
from support.registry import REGISTRY
from support.s3_server import WEED
from support.web_servers import NGINX

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, Capability, Program

_DOCUMENTS = sorted((PROJECT / "docs" / "how-to").glob("*.md"))
#: Steps of this page that begin so have a test of their own, on the machine itself.
_VM, _IN_A_VM = "without-ublk.md", "scripts/vm "
_NEEDED: dict[str, tuple[Capability, ...]] = {
    "images.md": (REGISTRY, Program("skopeo", "skopeo"), Program("busybox", "busybox")),
    "podman.md": (REGISTRY, Program("busybox", "busybox"), PODMAN),
    "sandboxes.md": (Program("skopeo", "skopeo"), Program("busybox", "busybox")),
    "sources.md": (REGISTRY, WEED),
    "site-caches.md": (NGINX,),
}


@pytest.mark.device
@pytest.mark.parametrize(
    "document", [x for x in _DOCUMENTS if steps(x)], ids=lambda path: path.stem
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
        if document.name == "podman.md":
            private = Step(0, f"cd {sparse_path}\n{PRIVATE}\ncd {PROJECT}", "")
            replay_steps(document, [private], shell)
        here = [x for x in steps(document) if not x.command.startswith(_IN_A_VM)]
        replay_steps(document, here, shell)


@pytest.mark.vm
@pytest.mark.timeout(600)
def test_a_machine_of_its_own(sparse_path: Path, need: Need) -> None:
    need(ROOT)
    output = sparse_path / "printed"
    document = PROJECT / "docs" / "how-to" / _VM
    in_a_vm = [x for x in steps(document) if x.command.startswith(_IN_A_VM)]
    assert in_a_vm
    with session(PROJECT, output, isolated=False) as shell:
        replay_steps(document, in_a_vm, shell, timeout_s=250)
