"""``btrfs-ublk image convert``: from a registry to a registry, in one command."""

import base64
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from support.images import ordinary_image
from support.needs import Need
from support.registry import PASSWORD, USER, Registry, registry_fixture
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import Helper
from btrfs_ublk.base.helpers import MKIMAGE
from btrfs_ublk.cli.image import command
from btrfs_ublk.device.locks import lock_file
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image import convert
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.documents import (
    INDEX,
    SEALED_IN,
    descriptors,
    parse_document,
    to_bytes,
)
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pull import NotSealedError, inspect_image
from btrfs_ublk.image.reference import parse_reference
from btrfs_ublk.image.store import IMAGES_VARIABLE
from btrfs_ublk.image.transfer import open_repository, push_image

PLATFORM = ("--platform", "linux/amd64")
#: Below the directory of --work.
CONVERSIONS = f"work/btrfs-ublk-convert-{os.geteuid()}"


registry = registry_fixture()


@pytest.fixture
def access(registry: Registry, tmp_path: Path) -> RegistryAccess:
    path = tmp_path / "config.json"
    path.touch(mode=0o600)
    login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    path.write_text(json.dumps({"auths": {registry.host: {"auth": login}}}))
    return RegistryAccess(docker_config=path, insecure=True)


@pytest.fixture
def source(registry: Registry, access: RegistryAccess, tmp_path: Path) -> str:
    """An image of two layers in the registry."""
    some = random.Random(7)
    layout = Layout.made(tmp_path / "ordinary")
    lower = {f"lib/{x}": some.randbytes(400_000) for x in range(3)}
    one = ordinary_image(layout, lower, {"bin/app": b"\x7fELF", "lib/.wh.0": b""})
    layout.tag(one, "1")
    name = parse_reference(f"{registry.host}/source/{tmp_path.name}:1")
    with open_repository(name, access, writing=True) as repository:
        push_image(layout, layout.find("1"), name, repository)
    return str(name)


@pytest.fixture
def argv(
    access: RegistryAccess, sparse_path: Path, need: Need, source: str, tmp_path: Path
) -> list[str]:
    """The command but for the new image's name."""
    need(Helper(MKIMAGE))
    options = ["--insecure", "--docker-config", str(access.docker_config), "--json"]
    return ["convert", source, *PLATFORM, *options, "--work", str(sparse_path / "work")]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGES_VARIABLE, str(tmp_path / "images"))


def image(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refusal(*words: str) -> BtrfsUblkError:
    with pytest.raises(BtrfsUblkError) as refused:
        image(*words)
    return refused.value


def manifests(name: str, access: RegistryAccess) -> list[dict[str, Any]]:
    reference = parse_reference(name)
    with open_repository(reference, access) as repository:
        index = parse_document(repository.document(reference.version).data, name)
        return [
            parse_document(repository.document(one["digest"]).data, name)
            for one in index["manifests"]
        ]


def test_the_same_image_has_the_same_digests(
    argv: list[str],
    source: str,
    access: RegistryAccess,
    registry: Registry,
    sparse_path: Path,
) -> None:
    new = f"{registry.host}/team/app:1"
    first = image(*argv, new, "--check")
    # The two layers and the config are those of the source's repository.
    assert (first["mounted"], first["uploaded"], first["there"]) == (3, 3, 0)
    second = image(*argv, f"{registry.host}/team/other:1", "--threads", "1")
    assert second["digest"] == first["digest"]
    assert image(*argv, new)["uploaded_bytes"] == 0
    assert not (sparse_path / CONVERSIONS).exists()

    reference = parse_reference(source)
    with open_repository(reference, access) as repository:
        document = repository.document(reference.version)
    before = parse_document(document.data, source)
    assert first["source"].endswith(f"@{document.digest}")
    ordinary, sealed = manifests(new, access)
    assert ordinary["config"] == before["config"]
    for ours, theirs in zip(ordinary["layers"], before["layers"], strict=True):
        assert ours.pop("annotations") == {SEALED_IN: first["sealed"]}
        assert ours == theirs
    report = inspect_image(parse_reference(new), access)
    assert report.manifest.digest == first["sealed"]


@pytest.mark.data
def test_a_killed_one_is_gone_on_with(
    argv: list[str], registry: Registry, sparse_path: Path
) -> None:
    blobs = sparse_path / CONVERSIONS
    program = [str(Path(sys.executable).with_name("btrfs-ublk")), "image"]
    new = f"{registry.host}/team/killed:1"
    for pattern in ("*/layout/blobs/sha256/*", "*/layout/blobs/.new-*/image/data"):
        with subprocess.Popen(
            [*program, *argv, new], stdout=subprocess.DEVNULL, env=os.environ
        ) as process:
            wait_until(lambda: any(blobs.glob(pattern)) or process.poll() is not None)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == 0 or list(blobs.iterdir())
    done = image(*argv, new, "--check")
    assert done["digest"] == image(*argv, f"{registry.host}/team/whole:1")["digest"]
    assert not blobs.exists()


def test_one_at_a_time(
    argv: list[str],
    registry: Registry,
    sparse_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = f"{registry.host}/team/once:1"

    def held(*_: object, **__: object) -> None:
        (path,) = (sparse_path / CONVERSIONS).glob("*.lock")
        assert lock_file(path) is None
        assert "another command converts" in str(refusal(*argv, new))
        raise BtrfsUblkError("enough")

    monkeypatch.setattr(convert, "push_image", held)
    assert refusal(*argv, new).message == "enough"


def test_images_of_other_platforms_stay(
    argv: list[str],
    registry: Registry,
    access: RegistryAccess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout.made(tmp_path / "platforms")
    described = []
    for system in ("amd64", "arm64", "riscv64"):
        about = {"os": "linux", "architecture": system}
        one = ordinary_image(layout, {"bin/app": system.encode() * 99}, **about)
        described.append({**one.raw, "platform": about})
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": described}
    layout.tag(layout.add(INDEX, to_bytes(index)), "1")
    name = parse_reference(f"{registry.host}/team/platforms:1")
    with open_repository(name, access, writing=True) as repository:
        push_image(layout, layout.find("1"), name, repository)

    def convert_in_place(platform: str) -> dict[str, Any]:
        words = [*argv, str(name), "--platform", platform]
        words[1] = str(name)
        return image(*words)

    def there() -> list[tuple[str, bool]]:
        with open_repository(name, access) as repository:
            document = repository.document(name.version)
        listed = descriptors(parse_document(document.data, "it"), "manifests", "it")
        return [(str(x.platform["architecture"]), x.is_sealed) for x in listed]

    amd64 = convert_in_place("linux/amd64")
    others = [("riscv64", False), ("unknown", True)]
    assert there() == [("amd64", False), ("arm64", False), *others]
    arm64 = convert_in_place("linux/arm64")
    assert there() == [
        ("amd64", False), ("arm64", False), *others, ("unknown", True)
    ]  # fmt: skip
    assert convert_in_place("linux/amd64")["digest"] == arm64["digest"]

    for machine, sealed in (("x86_64", amd64), ("aarch64", arm64)):
        monkeypatch.setattr(os, "uname", lambda m=machine: SimpleNamespace(machine=m))
        assert inspect_image(name, access).manifest.digest == sealed["sealed"]
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    with pytest.raises(NotSealedError, match="has no sealed image"):
        inspect_image(name, access)
