"""How to get to registries: logins, certificates, caches, and mirrors as containerd's
hosts.toml names them (its docs/hosts.md). Nothing is asked here, so that commands that
only pass that on do not load what asks (connection)."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from btrfs_ublk.base.hosts import (
    check_cache,
    containerd_directory,
    find_rule,
    is_plain,
    read_hosts,
)
from btrfs_ublk.base.log import log
from btrfs_ublk.base.private_dirs import read_trusted_toml
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.errors import BtrfsUblkError, UsageError

_MIRRORS_FILE = "hosts.toml"
#: For registries without a directory of their own.
_DEFAULT = "_default"
#: What a mirror may say that we cannot do, and what that means for it.
_NOT_DONE = ("skip_verify", "client", "header")


class RegistryError(BtrfsUblkError):
    """A registry refused a request, or gave none of the answers that it may give.
    ``status`` is that of HTTP; None without an answer."""

    def __init__(
        self, message: str, *, hint: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status


@dataclass(frozen=True)
class RegistryAccess:
    """How to get to a registry: a config.json with its login, certificates to trust
    instead of the system's, and whether to ask by http, which is for loopback.

    ``via``: caches that are asked for large blobs first; None: those of hosts.toml.
    ``via_plain``: tokens may go to them without TLS."""

    docker_config: Path | None = None
    ca_file: Path | None = None
    insecure: bool = False
    via: tuple[str, ...] | None = None
    via_plain: bool = False

    def keys(self) -> dict[str, str | bool]:
        """Return what a mirror of a map has of it."""
        paths = {"docker_config": self.docker_config, "ca_file": self.ca_file}
        keys: dict[str, str | bool] = {x: str(y) for x, y in paths.items() if y}
        return keys | ({"insecure": True} if self.insecure else {})

    def of(self, registry: str) -> RegistryAccess:
        """Return how to get to one of several registries: only those on loopback are
        asked by http."""
        return replace(self, insecure=self.insecure and on_loopback(registry))

    def caches(self, netloc: str) -> tuple[str, ...]:
        """Return the caches in front of a registry. Raises UsageError."""
        if self.via:
            for url in self.via:
                if is_plain(check_cache(url, "--via")) and not self.via_plain:
                    raise UsageError(
                        f"the registry's tokens would go to {url} without TLS",
                        hint="write https://, or allow it: --via-plain",
                    )
            return self.via
        rule = find_rule(read_hosts(), netloc)
        if rule is None:
            return ()
        return tuple(x for x in rule.caches if rule.plain or not is_plain(x))


def on_loopback(place: str) -> bool:
    """Whether a registry, or what a URL names, is on this machine."""
    host = ""
    try:
        host = urlsplit(place if "://" in place else f"http://{place}/").hostname or ""
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


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
        more = RegistryAccess(ca_file=self.ca_file, insecure=self.insecure).keys()
        own = {"registry": self.host, "namespace": self.namespace, "path": self.path}
        return {**own, **more}


def registry_mirrors(registry: str) -> tuple[RegistryMirror, ...]:
    """Return the mirrors of a registry in their order; none unless our hosts.toml names
    containerd's directory. Raises UsageError for a file that cannot be understood."""
    directory = containerd_directory()
    if directory is None:
        return ()
    for name in (*_names(registry), _DEFAULT):
        path = directory / name / _MIRRORS_FILE
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
    capabilities = about.get("capabilities", ["pull", "resolve"])
    if not isinstance(capabilities, list):
        raise UsageError(f"{path}: capabilities of {url} is {capabilities!r}, no list")
    if "pull" not in capabilities:
        return None
    if "://" not in url:
        url = f"http{'' if on_loopback(url) else 's'}://{url}"
    parts = urlsplit(url)
    insecure = parts.scheme == "http"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{path}: host {url!r} is no http or https URL")
    refused = [key for key in _NOT_DONE if about.get(key)]
    if insecure and not on_loopback(url):
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
