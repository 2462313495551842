"""The kubelet's configuration of plugins that bring logins, and such a plugin."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.lazy_images import Place
from support.needs import Need
from support.registry_server import PASSWORD, REGISTRY, USER, registry_server

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE, VOLUMES_VARIABLE
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.store import IMAGES_VARIABLE

#: A plugin that answers with what is in the file `answer`, and keeps what it was asked.
PLUGIN = (
    '#!/bin/sh\ncat >> "$HERE/asked" && echo >> "$HERE/asked" && cat "$HERE/answer"\n'
)


def configuration(path: Path, *images: str, **keys: object) -> Path:
    """Write a kubelet's configuration of one plugin, as YAML."""
    program = path / "plugin"
    program.write_text(PLUGIN)
    program.chmod(0o755)
    shown = "".join(f'  - "{one}"\n' for one in images)
    more = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in keys.items())
    file = path / "providers.yaml"
    file.write_text(
        "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\n"
        f"providers:\n- name: plugin\n  matchImages:\n{shown}"
        '  defaultCacheDuration: "12h"\n'
        "  apiVersion: credentialprovider.kubelet.k8s.io/v1\n"
        f"  env:\n  - name: HERE\n    value: {path}\n{more}"
    )
    return file


def answer(path: Path, password: str, *, pattern: str, duration: str = "1s") -> None:
    text = {
        "kind": "CredentialProviderResponse",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "cacheKeyType": "Registry",
        "cacheDuration": duration,
        "auth": {
            pattern: {"username": USER, "password": password},
            "*.elsewhere.example.org": {"username": "no", "password": "no"},
        },
    }
    new = path / "answer.new"
    new.write_text(json.dumps(text))
    new.replace(path / "answer")


@pytest.fixture
def place(
    need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """A registry that wants tokens, by http."""
    need(ROOT, BTRFS, LOOP, FUSE, REGISTRY)
    for variable, name in (
        (VOLUMES_VARIABLE, "volumes"),
        (IMAGES_VARIABLE, "images"),
        (CONFIG_VARIABLE, "etc"),
    ):
        monkeypatch.setenv(variable, str(sparse_path / name))
    (sparse_path / "etc").mkdir()
    (sparse_path / "registry").mkdir()
    with ExitStack() as stack:
        registry = stack.enter_context(registry_server(sparse_path / "registry"))
        login = sparse_path / "config.json"
        login.touch(mode=0o600)
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        login.write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
        access = RegistryAccess(docker_config=login, insecure=True)
        found = Place(sparse_path, registry, access, stack.close)
        found.allow()
        yield found
