"""Logins for images, from where Docker's client and podman keep them.

The same files, keys and helpers that oci mirrors take (csrc/fetch/mirror/docker.c,
login_key.c); tests/support/tables/logins.json has cases for both.
"""

from __future__ import annotations

import base64
import fnmatch
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from btrfs_ublk.base.log import log
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError, CommandError, UsageError

_HELPER_TIMEOUT_S = 10.0
_MAX_BYTES = 1 << 20
_HELPER = re.compile(r"[A-Za-z0-9._-]{1,63}")
HUB, _HUB_KEY, HUB_ENTRY = (
    "docker.io",
    "https://index.docker.io/v1/",
    "index.docker.io",
)
#: The user that helpers give when the secret is a token, and no password.
_TOKEN_USER = "<token>"


@dataclass(frozen=True)
class Login:
    """A user and a password, or a token instead. An identity token is exchanged for
    others; a registry token is sent as it is. ``absent`` is a credential helper that
    may have a login, and is not installed."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    identity_token: str | None = field(default=None, repr=False)
    registry_token: str | None = field(default=None, repr=False)
    absent: str | None = None

    @property
    def is_known(self) -> bool:
        return bool(self.user or self.identity_token or self.registry_token)


def find_login(
    registry: str, repository: str, docker_config: Path | None = None
) -> Login:
    """Return the login for a repository; without any in the files, nothing is known.

    Without ``docker_config``, the files are those of Docker's client and podman, which
    may be missing; the first that has a login counts. Raises UsageError for a file that
    is not valid, or that others may read, BtrfsUblkError when a credential helper
    fails.
    """
    absent = None
    for path in _paths(docker_config):
        config = _read(path)
        login = Login()
        helper = _helper_of(config, registry, repository)
        if helper is not None:
            login = _ask(helper, _HUB_KEY if registry == HUB else registry)
            absent = absent or login.absent
        if not login.is_known:
            entry = _entry(config.get("auths"), registry, repository)
            login = _login_of(entry, path)
        if login.is_known:
            return login
    return Login(absent=absent)


def config_of(
    registry: str, repository: str, docker_config: Path | None
) -> dict[str, Any]:
    """Return what is in the first file that may have a login for a repository; see
    find_login()."""
    for path in _paths(docker_config):
        config = _read(path)
        if (
            _helper_of(config, registry, repository) is not None
            or _entry(config.get("auths"), registry, repository) is not None
        ):
            return config
    return {}


def _paths(docker_config: Path | None) -> list[Path]:
    if docker_config is not None:
        return [docker_config]
    return [path for path in usual_paths() if path.exists()]


def usual_paths(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return where Docker's client and podman keep logins, in the order that counts."""

    def below(variable: str, *rest: str) -> list[Path]:
        directory = environment.get(variable, "")
        # Another program with the same environment has another working directory.
        return [Path(directory, *rest)] if directory.startswith("/") else []

    auth, docker = ("containers", "auth.json"), "config.json"
    # Either of them stands for all others.
    only = below("REGISTRY_AUTH_FILE") or below("DOCKER_CONFIG", docker)
    return only or [
        *below("XDG_RUNTIME_DIR", *auth),
        Path(f"/run/containers/{os.geteuid()}/auth.json"),
        *(below("XDG_CONFIG_HOME", *auth) or below("HOME", ".config", *auth)),
        *below("HOME", ".docker", docker),
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        # O_NONBLOCK: opening a FIFO must not hang.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            check_closed(path, os.fstat(fd))
            config = json.loads(file.read(_MAX_BYTES))
    except OSError as error:
        raise UsageError(
            f"cannot read credentials in {path}: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        # NB: do not show the content, which may be half of a secret.
        raise UsageError(f"{path} is not JSON") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} is no JSON object")
    return config


def check_closed(path: Path, status: os.stat_result) -> None:
    """Raise UsageError for a file with secrets that others can read."""
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is no regular file")
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o077:
        raise UsageError(
            f"{path} has secrets and is open to others",
            hint=f"chmod 600 {path}, and let it belong to root or to you",
        )


def _text(entry: Any, key: str) -> str | None:
    value = entry.get(key) if isinstance(entry, dict) else None
    return value if isinstance(value, str) and value else None


def _helper_of(config: dict[str, Any], registry: str, repository: str) -> str | None:
    helper = _entry(config.get("credHelpers"), registry, repository)
    if isinstance(helper, str) and helper:
        return helper
    return _text(config, "credsStore")


def _entry(entries: object, registry: str, repository: str) -> object:
    """Return the value whose key names a repository, or the beginning of that in whole
    components, most precisely. Keys are names as of images, or URLs."""
    if not isinstance(entries, dict):
        return None
    registry = registry.rpartition("://")[2]  # of a web server, it is a URL
    host, place = _one_name(registry), f"{registry}/{repository}/"
    found = []
    for key, value in entries.items():
        pattern, path = _parse_key(key)
        if host_matches(pattern, host) and f"{repository}/".startswith(path):
            own = place.startswith(f"{key}/")
            found.append(((pattern == host, len(path), own, key), value))
    return max(found, key=lambda each: each[0])[1] if found else None


def _parse_key(key: str) -> tuple[str, str]:
    """Return a host, and a path that is empty or ends with a slash."""
    scheme, mark, rest = key.partition("://")
    host, _, path = (rest if mark else scheme).partition("/")
    # The interface's version in a URL is no part of a name. Without a scheme only its
    # last slash tells it from a repository's name.
    version, slash, rest = path.partition("/")
    if version in ("v1", "v2") and (mark or (slash and not rest)):
        path = rest
    path = path.strip("/")
    return _one_name(host), f"{path}/" if path else ""


def _one_name(host: str) -> str:
    """The Hub has three names."""
    return HUB if host in (HUB_ENTRY, "registry-1.docker.io") else host


def host_matches(pattern: str, host: str) -> bool:
    """Return whether the kubelet would take a host[:port] for one of ``pattern``: as
    many parts, each of which may be a pattern, and the same port."""
    if pattern == host:
        return True
    if pattern.startswith("["):  # an address
        return False
    (wanted, _, port), (given, _, given_port) = pattern.partition(":"), host.partition(
        ":"
    )
    parts, given_parts = wanted.split("."), given.split(".")
    return (
        port == given_port
        and len(parts) == len(given_parts)
        and all(
            fnmatch.fnmatchcase(b, a.replace("[^", "[!"))
            for a, b in zip(parts, given_parts, strict=True)
        )
    )


def _pair(user: str, secret: str) -> Login:
    if user == _TOKEN_USER:
        return Login(identity_token=secret)
    return Login(user, secret)


def _login_of(entry: object, path: Path) -> Login:
    if token := _text(entry, "identitytoken"):
        return Login(identity_token=token)
    if token := _text(entry, "registrytoken"):
        return Login(registry_token=token)
    user, password = _text(entry, "username"), _text(entry, "password")
    if user and password:
        return _pair(user, password)
    encoded = _text(entry, "auth")
    if encoded is None:
        return Login()
    try:
        plain = base64.b64decode(encoded, validate=True).decode()
    except ValueError:
        plain = ""
    user, colon, password = plain.partition(":")
    if not colon:
        raise UsageError(f'{path} has an "auth" that is not base64 of "user:password"')
    return _pair(user, password)


def _ask(name: str, key: str) -> Login:
    if not _HELPER.fullmatch(name):
        raise UsageError(f"{name[:60]!r} is no name of a credential helper")
    program = f"docker-credential-{name}"
    if shutil.which(program) is None:
        log.info("%s is not installed, so no login of it is used", program)
        return Login(absent=program)
    try:
        answer = run(
            [program, "get"],
            input=key,
            timeout_s=_HELPER_TIMEOUT_S,
            ok_statuses=range(256),
        )
    except CommandError as error:
        error.prefix("credentials")
        raise
    if answer.returncode:
        # The protocol's text for "there are none".
        if "credentials not found" in answer.stdout:
            return Login()
        raise BtrfsUblkError(f"{program} get has ended with {answer.returncode}")
    try:
        found = json.loads(answer.stdout)
    except ValueError:
        found = None
    user, secret = _text(found, "Username"), _text(found, "Secret")
    if not user or not secret:
        raise BtrfsUblkError(f"{program} answers without a user and a secret")
    return _pair(user, secret)
