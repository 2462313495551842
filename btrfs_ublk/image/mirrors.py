"""Mirrors of registries, as containerd's hosts.toml names them (its docs/hosts.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from btrfs_ublk.base.hosts import containerd_directory
from btrfs_ublk.base.log import log
from btrfs_ublk.base.private_dirs import read_trusted_toml
from btrfs_ublk.errors import UsageError

_FILE_NAME = "hosts.toml"
#: For registries without a directory of their own.
_DEFAULT = "_default"
#: What a mirror may say that we cannot do, and what that means for it.
_NOT_DONE = ("skip_verify", "client", "header")


@dataclass(frozen=True)
class RegistryMirror:
    """A host that has what a registry has. ``path`` is where its interface begins, and
    ``namespace`` the registry that it is asked about. ``resolves``: it is asked for
    tags, too."""

    host: str
    path: str
    namespace: str
    insecure: bool = False
    ca_file: Path | None = None
    resolves: bool = True

    @property
    def base(self) -> str:
        """The URL below which its repositories are."""
        return f"http{'' if self.insecure else 's'}://{self.host}{self.path}/"

    def keys(self) -> dict[str, Any]:
        """Return what a mirror of a map has other than that of the registry itself."""
        keys: dict[str, Any] = {
            "registry": self.host,
            "namespace": self.namespace,
            "path": self.path,
        }
        if self.insecure:
            keys["insecure"] = True
        if self.ca_file is not None:
            keys["ca_file"] = str(self.ca_file)
        return keys


def registry_mirrors(registry: str) -> tuple[RegistryMirror, ...]:
    """Return the mirrors of a registry in their order; none unless our hosts.toml names
    containerd's directory. Raises UsageError for a file that cannot be understood."""
    directory = containerd_directory()
    if directory is None:
        return ()
    for name in (*_names(registry), _DEFAULT):
        path = directory / name / _FILE_NAME
        if (keys := read_trusted_toml(path)) is not None:
            return _mirrors(keys, registry, path)
    return ()


def _names(registry: str) -> list[str]:
    host, colon, port = registry.rpartition(":")
    return [f"{host}_{port}_", registry] if colon else [registry]


def _mirrors(
    keys: Mapping[str, Any], registry: str, path: Path
) -> tuple[RegistryMirror, ...]:
    hosts = keys.get("host", {})
    if not isinstance(hosts, dict) or not all(
        isinstance(about, dict) for about in hosts.values()
    ):
        raise UsageError(
            f"{path}: host is {hosts!r}, and not tables",
            hint='write [host."https://mirror.example.org"]',
        )
    found = (_mirror(url, about, registry, path) for url, about in hosts.items())
    return tuple(mirror for mirror in found if mirror is not None)


def _mirror(
    url: str, about: Mapping[str, Any], registry: str, path: Path
) -> RegistryMirror | None:
    """Return a mirror; None for one that is not asked for what we read."""
    from btrfs_ublk.image.access import is_loopback

    capabilities = about.get("capabilities", ["pull", "resolve"])
    if not isinstance(capabilities, list):
        raise UsageError(f"{path}: capabilities of {url} is {capabilities!r}, no list")
    if "pull" not in capabilities:
        return None
    if "://" not in url:
        url = f"http{'' if is_loopback(f'http://{url}/') else 's'}://{url}"
    parts = urlsplit(url)
    insecure = parts.scheme == "http"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{path}: host {url!r} is no http or https URL")
    refused = [key for key in _NOT_DONE if about.get(key)]
    if insecure and not is_loopback(url):
        refused.append("http")
    ca_file = about.get("ca")
    if isinstance(ca_file, list) and len(ca_file) == 1:
        ca_file = ca_file[0]
    if ca_file is not None and not isinstance(ca_file, str):
        refused.append("ca with several files")
    if refused:
        log.warning("%s: %s is not asked: %s", path, url, ", ".join(refused))
        return None
    below = parts.path.rstrip("/")
    if not about.get("override_path") and not below.endswith("/v2"):
        below += "/v2"
    return RegistryMirror(
        host=parts.netloc,
        path=below or "/v2",
        namespace=registry,
        insecure=insecure,
        ca_file=None if ca_file is None else path.parent / ca_file,
        resolves="resolve" in capabilities,
    )
