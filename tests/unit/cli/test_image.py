"""``btrfs-ublk image``: what it prints, and what it says of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.images import sealed_image
from support.registry import Registry, registry_fixture, registry_server

from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE
from btrfs_ublk.cli.image import command
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image.store import IMAGES_VARIABLE

registry = registry_fixture(tls=True)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGES_VARIABLE, str(tmp_path / "images"))
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path))


def image(*words: object) -> Result:
    return CliRunner().invoke(
        command, [str(word) for word in words], catch_exceptions=False
    )


def refusal(*words: object) -> BtrfsUblkError:
    with pytest.raises(BtrfsUblkError) as refused:
        image(*words)
    return refused.value


def test_from_a_layout_to_another_machine(registry: Registry, tmp_path: Path) -> None:
    made = sealed_image(tmp_path / "image")
    name, ca = f"{registry.host}/team/app:1", ("--ca-file", registry.ca_file)
    result = image("push", made.name, name, *ca)
    assert result.stdout == f"{registry.host}/team/app@{made.digest}\n"
    assert result.stderr.startswith("6 blobs sent (")
    again = json.loads(image("push", made.name, name, *ca, "--json").stdout)
    assert again == {
        "image": name,
        "digest": made.digest,
        "uploaded": 0,
        "uploaded_bytes": 0,
        "mounted": 0,
        "there": 6,
    }
    other = f"{registry.host}/team/copy:1"
    mounted = image("push", made.name, other, *ca, "--mount-from", "team/app", "--json")
    assert json.loads(mounted.stdout)["mounted"] == 6

    shown = image("inspect", name, *ca)
    assert f"sealed as  {made.sealed}\n" in shown.stdout
    report = json.loads(image("inspect", made.name, "--json").stdout)
    assert report["digest"] == made.sealed and report["name"] == str(made.name)

    refused = refusal("pull", name, *ca)
    assert refused.message == (
        f"no sealed image may come from {registry.host}/team/app: there is no "
        f"{tmp_path / 'images.toml'}"
    )
    policy = f'[[allow]]\nfrom = "{registry.host}/team/*"\n'
    (tmp_path / "images.toml").write_text(policy)
    pulled = image("pull", name, *ca)
    assert pulled.stdout == f"{registry.host}/team/app@{made.sealed}\n"
    assert pulled.stderr.endswith(f"allows {registry.host}/team/*\n")

    listed = image("list").stdout.splitlines()
    assert listed[0].split() == ["IMAGE", "DIGEST", "PINNED", "PACK", "DATA"]
    assert listed[1].split()[:3] == [name, made.sealed[:19], "-"]
    assert image("gc", "--dry-run").stdout == f"would remove {made.sealed}\n"
    image("pull", name, *ca, "--pin")
    assert image("gc").stdout == ""
    (found,) = json.loads(image("list", "--json").stdout)
    assert found["pinned"] and found["names"] == [name]


def test_a_registry_without_tls_is_named_so(tmp_path: Path) -> None:
    with registry_server(tmp_path) as server:
        refused = refusal("inspect", f"{server.host}/app:1")
    assert "it speaks http, not https" in refused.message
    assert "--insecure" in str(refused.hint)
