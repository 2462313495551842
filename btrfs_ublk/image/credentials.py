"""Logins of registries, from where Docker's client keeps them: config.json.

The same files, keys and helpers that oci mirrors take (csrc/lazy/mirror/docker.c).
"""

from __future__ import annotations

import base64
import json
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    others; a registry token is sent as it is."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    identity_token: str | None = field(default=None, repr=False)
    registry_token: str | None = field(default=None, repr=False)


def find_login(registry: str, docker_config: Path | None = None) -> Login:
    """Return the login for a registry; without any in the file, nothing is known.

    Without ``docker_config``, the file is that of Docker's client, which may be
    missing. Raises UsageError for a file that is not valid, or that others may read,
    BtrfsUblkError when a credential helper fails.
    """
    path = docker_config or _usual_path()
    config = read_docker_config(docker_config)
    if path is None or not config:
        return Login()
    helper = _helper_of(config, registry)
    if helper is not None:
        return _ask(helper, _HUB_KEY if registry == HUB else registry)
    entry = _entry(config.get("auths"), HUB_ENTRY if registry == HUB else registry)
    return _login_of(entry, path)


def read_docker_config(path: Path | None) -> dict[str, Any]:
    """Return what is in a config.json; see find_login()."""
    usual = path or _usual_path()
    if usual is None or (path is None and not usual.exists()):
        return {}
    return _read(usual)


def _usual_path() -> Path | None:
    for variable, rest in (("DOCKER_CONFIG", ""), ("HOME", ".docker")):
        directory = os.environ.get(variable, "")
        if directory.startswith("/"):
            return Path(directory, rest, "config.json")
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        # O_NONBLOCK: opening a FIFO must not hang.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            _check(path, os.fstat(fd))
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


def _check(path: Path, status: os.stat_result) -> None:
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


def _helper_of(config: dict[str, Any], registry: str) -> str | None:
    return _text(config.get("credHelpers"), registry) or _text(config, "credsStore")


def _entry(auths: object, registry: str) -> object:
    if not isinstance(auths, dict):
        return None
    if registry in auths:
        return auths[registry]
    for key, value in auths.items():
        # Keys have been written both with and without a scheme and a path.
        if key.partition("://")[2].partition("/")[0] == registry or (
            "://" not in key and key.partition("/")[0] == registry
        ):
            return value
    return None


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
