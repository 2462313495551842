"""Caches in front of hosts, and where mirrors of registries are named:
/etc/btrfs-ublk/hosts.toml (docs/design/hosts.md)."""

from __future__ import annotations

import fnmatch
import ipaddress
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from btrfs_ublk.base.log import log
from btrfs_ublk.base.private_dirs import (
    CONFIG_DIRECTORY,
    CONFIG_VARIABLE,
    read_trusted_toml,
)
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.errors import UsageError

FILE_NAME = "hosts.toml"


@dataclass(frozen=True)
class Rule:
    """Caches in front of the hosts that match ``host``, a pattern. ``plain``:
    credentials may go to them without TLS."""

    host: str
    caches: tuple[str, ...]
    plain: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return it as servers take it."""
        return {"for": self.host, "caches": list(self.caches), "plain": self.plain}

    def matches(self, netloc: str) -> bool:
        """Whether it is about a host, which has its port or none."""
        name = netloc.rpartition(":")[0] or netloc
        return any(fnmatch.fnmatchcase(x, self.host) for x in (netloc, name))


def check_cache(url: object, what: str) -> str:
    """Return the URL of a cache. Raises UsageError, which names it as ``what``, unless
    it is a scheme, a host and perhaps a port."""
    if not isinstance(url, str):
        raise UsageError(f"{what} is {url!r}, not a URL in quotes")
    hint = "write http://HOST:PORT, or https://"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{what} {url!r} is no URL: {error}", hint=hint) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise UsageError(f"{what} {url!r} is no http or https URL", hint=hint)
    if parts.username is not None or parts.path not in ("", "/") or parts.query:
        raise UsageError(
            f"{what} has more than scheme, host and port: "
            f"{parts.scheme}://{parts.hostname}{parts.path}",
            hint="the path, and credentials, are those of the source",
        )
    if parts.fragment or not url.isascii() or any(x <= " " for x in url):
        raise UsageError(f"{what} {url!r} is no URL of a cache", hint=hint)
    return url


def is_plain(url: str) -> bool:
    """Whether what is sent there can be read on the way."""
    host = urlsplit(url).hostname or ""
    if url.lower().startswith("https:") or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def hosts_path() -> Path:
    """Return the path of the file, which may be missing."""
    return Path(os.environ.get(CONFIG_VARIABLE) or CONFIG_DIRECTORY, FILE_NAME)


def read_hosts(path: Path | None = None) -> tuple[Rule, ...]:
    """Return the rules of this machine; none without a file. Raises UsageError."""
    path = path or hosts_path()
    tables = _read(path).get("via", [])
    if not isinstance(tables, list):
        raise UsageError(f"{path}: via is no list of tables", hint="write [[via]]")
    return tuple(_rule(table, str(path)) for table in tables)


def containerd_directory(path: Path | None = None) -> Path | None:
    """Return the directory with containerd's hosts.toml of each registry; None unless
    the file names it. Raises UsageError."""
    path = path or hosts_path()
    named = _read(path).get("containerd")
    if named is None:
        return None
    if not isinstance(named, str) or not os.path.isabs(named):
        raise UsageError(
            f"{path}: containerd is {named!r}, not an absolute path in quotes",
            hint='write containerd = "/etc/containerd/certs.d"',
        )
    return Path(named)


def _read(path: Path) -> dict[str, Any]:
    keys = read_trusted_toml(path) or {}
    if unknown := keys.keys() - {"via", "containerd"}:
        raise UsageError(
            f"{path}: key {min(unknown)!r} is unknown",
            hint="there are: [[via]], containerd",
        )
    return keys


def _rule(table: object, where: str) -> Rule:
    if not isinstance(table, dict):
        raise UsageError(f"{where}: via is no list of tables", hint="write [[via]]")
    if unknown := table.keys() - {"for", "caches", "plain"}:
        raise UsageError(
            f"{where}: key {min(unknown)!r} of via is unknown",
            hint="there are: for, caches, plain",
        )
    host, caches = table.get("for"), table.get("caches")
    plain = table.get("plain", False)
    if not isinstance(host, str) or not host:
        raise UsageError(
            f"{where}: for is {host!r}, not a host in quotes",
            hint='write for = "registry.example.org", or a pattern such as "*"',
        )
    if not isinstance(caches, list) or not caches:
        raise UsageError(
            f"{where}: caches is {caches!r}, not a list of URLs",
            hint='write caches = ["https://cache1.example.org"]',
        )
    if not isinstance(plain, bool):
        raise UsageError(f"{where}: plain is {plain!r}, not true or false")
    return Rule(host, tuple(check_cache(x, f"{where}: cache") for x in caches), plain)


def find_rule(rules: Iterable[Rule], netloc: str) -> Rule | None:
    """Return the first rule about a host."""
    return next((rule for rule in rules if rule.matches(netloc)), None)


def via_option(*, strict: bool = True) -> list[str]:
    """Return the option that tells a server of the rules of this machine. Raises
    UsageError if ``strict``, else a file that is wrong is left out with a warning: no
    device must be lost for it."""
    try:
        rules = read_hosts()
    except UsageError as error:
        if strict:
            raise
        log.warning("no caches are asked: %s", error.message)
        return []
    if not rules:
        return []
    return ["--via", json.dumps([rule.to_dict() for rule in rules])]
