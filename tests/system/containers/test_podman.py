"""podman runs images of volumes, from a store that it only reads."""

import json
import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.containers import PODMAN, PRIVATE, place_for_state
from support.images import tagged_image
from support.needs import Need, moments
from support.paths import PROJECT
from support.processes import killed_at_event
from support.registry import REGISTRY, registry_server

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.base.gc import collect
from btrfs_ublk.cli.podman import command
from btrfs_ublk.containers.podman import PodmanStore
from btrfs_ublk.errors import UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.commit import BaseImage
from btrfs_ublk.image.documents import CONFIG, MANIFEST
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.reference import parse_reference
from btrfs_ublk.image.transfer import open_repository, push_image

TIMEOUT_S = 240


def podman(*words: object) -> str:
    done = CliRunner().invoke(command, [str(x) for x in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_setup_makes_what_it_names(tmp_path: Path) -> None:
    store = tmp_path / "store"
    storage = tomllib.loads(podman("setup", "--store", store))["storage"]
    assert storage["driver"] == "overlay"
    assert storage["options"]["additionalimagestores"] == [str(store)]
    assert (store / "overlay-images" / "images.lock").exists()


IMAGE = BaseImage(
    name=parse_reference("localhost/app:1"),
    media_type=MANIFEST,
    document=b"{}",
    config={},
    config_data=b"{}",
    config_type=CONFIG,
    diff_ids=(),
    layers=(),
)


def test_what_a_killed_command_left_is_removed(tmp_path: Path) -> None:
    """Wherever it was killed, by the next one; but not what is another program's."""
    store = PodmanStore(tmp_path / "store")
    store.make()
    # As podman has the layers of an image: the lowest one's ID is its digest.
    others = [
        {"id": "a" * 64, "diff-digest": f"sha256:{'a' * 64}"},
        {"id": "b" * 64, "parent": "a" * 64, "diff-digest": f"sha256:{'c' * 64}"},
    ]
    store._write("overlay-layers", others)
    store._write("overlay-images", [{"id": "d" * 64, "layer": "b" * 64}])
    for one in others:
        (store.path / "overlay" / one["id"]).mkdir()
    before = sorted(store.path.rglob("*"))

    def add() -> None:
        with store._locked():
            store._add("app", ["localhost/app:1"], IMAGE, tmp_path / "tree", 7)

    def remove() -> None:
        with suppress(UsageError):
            store.remove("app")

    for act in (add, remove):
        for number in moments():
            if act == remove:
                add()
            was_killed = killed_at_event(number, act)
            assert collect().is_clean
            # An image that is listed is whole.
            assert all(Path(one.tree).name == "tree" for one in store.images())
            assert len(store._read("overlay-images")) == len(store.images()) + 1
            remove()
            assert sorted(store.path.rglob("*")) == before, (act, number)
            assert store._read("overlay-layers") == others
            if not was_killed:
                break
        assert number > 20


SCRIPT = r"""
set -e
exec 2>&1
name=$1
run() { podman run --rm --network none "$@" 2> >(grep -v net_cls >&2); }
btrfs-ublk podman setup --store $PWD/store > /etc/containers/storage.conf
btrfs-ublk volume up app --image oci:$PWD/sealed:app --mount $PWD/mnt \
    --cache $PWD/cache > said
btrfs-ublk podman add app --store $PWD/store --name localhost/app:1 --name $name
podman images --format '{{.Repository}}:{{.Tag}} {{.ReadOnly}}'
echo from two layers: $(run localhost/app:1)
echo its own files: $(run localhost/app:1 /bin/sh -c 'echo mine > /motd; cat /motd')
echo read-only: $(run --read-only localhost/app:1)
echo the image has: $(cat mnt/rootfs/motd)

# Children of it, and an ordinary one beside it, have the right files.
echo FROM localhost/app:1 > Containerfile
echo 'RUN ["/bin/sh", "-c", "echo child > /child"]' >> Containerfile
podman build --quiet --isolation chroot --network host --tag child . > said
echo child: $(run localhost/child /bin/sh -c 'cat /child /motd /lower')
btrfs-ublk podman add app --store $PWD/store --name localhost/app:1
podman pull --quiet --tls-verify=false $name > said
echo pulled: $(run $name) $(run $name /bin/sh -c 'cat /lower')
podman rmi --force $name child > said
echo still: $(run localhost/app:1)

# Forks, as directories.
btrfs-ublk image fork app one > said
echo fork: $(run --rootfs $PWD/mnt/forks/one /bin/sh -c 'echo kept > /motd; cat /motd')
run --rootfs $PWD/mnt/forks/one:O /bin/sh -c 'echo lost > /motd'
echo kept: $(cat mnt/forks/one/motd)

btrfs-ublk podman list --store $PWD/store --json > listed
btrfs-ublk podman remove app --store $PWD/store
podman images --format '{{.Repository}}:{{.Tag}}'
btrfs-ublk volume down app > said && btrfs-ublk volume remove app --yes > said
"""


@pytest.mark.device
def test_podman_runs_images_of_volumes(
    sparse_path: Path, need: Need, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(ROOT, BTRFS, LOOP, FUSE, PODMAN, REGISTRY)
    monkeypatch.setenv("BTRFS_UBLK_VOLUMES_DIR", str(sparse_path / "volumes"))
    busybox = Path("/bin/busybox").read_bytes()
    source = tagged_image(
        sparse_path / "ordinary",
        {"bin/sh": busybox, "lower": b"lower\n", "motd": b"first\n"},
        {"motd": b"upper\n", "etc/os-release": b"ID=test\n"},
        config={"Cmd": ["/bin/sh", "-c", "cat /lower /motd"]},
    )
    with registry_server(sparse_path, tls=True) as registry, place_for_state():
        name = parse_reference(f"{registry.host}/app:1")
        layout = Layout.opened(source.path)
        access = RegistryAccess(ca_file=registry.ca_file)
        with open_repository(name, access, writing=True) as repository:
            push_image(layout, layout.find("app"), name, repository)
        build_image(
            source,
            sparse_path / "sealed",
            BuildOptions(),
            tag="app",
            platform="linux/amd64",
        )
        (sparse_path / "script").write_text(SCRIPT)
        program: list[str | Path] = [PROJECT / "scripts/isolate", "bash", "-c"]
        done = subprocess.run(
            [*program, f"set -e\n{PRIVATE}\nbash script {name}"],
            cwd=sparse_path,
            env=os.environ
            | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    lines = done.stdout.splitlines()
    for line in (
        "from two layers: lower upper",
        "its own files: mine",
        "read-only: lower upper",
        "the image has: upper",
        "child: child upper lower",
        "pulled: lower upper lower",
        "still: lower upper",
        "fork: kept",
        "kept: kept",
        "localhost/app:1 true",
    ):
        assert line in lines, said
    (listed,) = json.loads((sparse_path / "listed").read_text())
    assert listed["volume"] == "app" and listed["names"] == ["localhost/app:1"]
    assert PodmanStore(sparse_path / "store").images() == []
    assert not list((sparse_path / "store/overlay/l").iterdir())
