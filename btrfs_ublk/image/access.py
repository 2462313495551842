"""How to get to registries. Nothing is asked here, so that whoever only passes that on
does not load what asks (connection)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from btrfs_ublk.base.hosts import check_cache, find_rule, is_plain, read_hosts
from btrfs_ublk.errors import BtrfsUblkError, UsageError


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
        keys: dict[str, str | bool] = {}
        for key in ("docker_config", "ca_file"):
            if (path := getattr(self, key)) is not None:
                keys[key] = str(path)
        if self.insecure:
            keys["insecure"] = True
        return keys

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


def on_loopback(registry: str) -> bool:
    """Whether a registry, or a store by its URL, is on this machine."""
    return is_loopback(registry if "://" in registry else f"http://{registry}/")


def is_loopback(url: str) -> bool:
    host = ""
    try:
        host = urlsplit(url).hostname or ""
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
