"""Logins of registries by the plugins that the kubelet asks for them.

The kubelet's configuration of such plugins (kubelet.config.k8s.io, the kind
CredentialProviderConfig) says which one is asked for which images. A plugin is a
program: it gets a CredentialProviderRequest on stdin, and writes its response to
stdout, as JSON (credentialprovider.kubelet.k8s.io).

Block servers read a login from a file, again when a registry refuses what they have. So
each image has such a file, which is written anew before its login ends:

    DIRECTORY/HEX.json      as Docker's config.json
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from btrfs_ublk.base.capabilities import PythonPackage, require
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError, UsageError, why_unread
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.logins import HUB, HUB_ENTRY, config_of, host_matches
from btrfs_ublk.image.reference import Reference
from btrfs_ublk.kernel.new_file import write_new

log = logging.getLogger(__name__)

_KIND = "CredentialProviderConfig"
_API = "credentialprovider.kubelet.k8s.io"
#: Of the files in a directory that the kubelet reads.
_SUFFIXES = (".json", ".yaml", ".yml")
#: As the kubelet's.
_TIMEOUT_S = 60.0
_MAX_BYTES = 1 << 20
#: A login is renewed after this part of its life; one that shall not be kept, after the
#: least time.
_RENEWED_AFTER = 0.75
_LEAST_S = 60.0
_DURATION = re.compile(r"(\d+(?:\.\d*)?)(ms|us|µs|ns|h|m|s)")
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A plugin, and for which images it is asked. ``life_s`` is how long its answers
    are good if it does not say so."""

    program: Path
    images: Sequence[str]
    life_s: float
    version: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def read_plugins(configuration: Path, directory: Path) -> list[Plugin]:
    """Read the kubelet's configuration of plugins, whose programs are in a directory.
    It is a file, or a directory of files, as for the kubelet. Raises UsageError."""
    files = [configuration]
    try:
        if configuration.is_dir():
            there = (x for x in configuration.iterdir() if x.suffix in _SUFFIXES)
            files = sorted(x for x in there if x.is_file())
    except OSError as error:
        raise UsageError(f"cannot read {configuration}: {why_unread(error)}") from error
    if not files:
        raise UsageError(f"{configuration} has no file {' or '.join(_SUFFIXES)}")
    found: dict[str, Plugin] = {}
    for file in files:
        for plugin in _plugins(file, directory):
            if found.setdefault(plugin.program.name, plugin) is not plugin:
                raise UsageError(
                    f"{file} has a provider {plugin.program.name!r}, which there is "
                    "already"
                )
    return list(found.values())


def _plugins(configuration: Path, directory: Path) -> list[Plugin]:
    try:
        text = configuration.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {configuration}: {why_unread(error)}") from error
    found = _parse(text, configuration)
    if not isinstance(found, dict) or found.get("kind") != _KIND:
        raise UsageError(
            f"{configuration} is of the kind "
            f"{found.get('kind') if isinstance(found, dict) else None!r}, not {_KIND}"
        )
    providers = found.get("providers")
    if not isinstance(providers, list) or not providers:
        raise UsageError(f"{configuration} has no list of providers")
    return [
        _plugin(one, f"provider {number} of {configuration}", directory)
        for number, one in enumerate(providers)
    ]


def _parse(text: str, path: Path) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    require(PythonPackage("PyYAML", "yaml"))
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is neither JSON nor YAML: {error}") from error


def _plugin(found: Any, where: str, directory: Path) -> Plugin:
    if not isinstance(found, dict):
        raise UsageError(f"{where} is no object")
    name = found.get("name")
    if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
        raise UsageError(f"{where} has the name {name!r}, which is no file's")
    program = directory / name
    if not os.access(program, os.X_OK):
        raise UsageError(
            f"{where}: there is no program {program}",
            hint="--credential-provider-bin-dir names the directory of plugins",
        )
    images, version = found.get("matchImages"), found.get("apiVersion")
    if not isinstance(images, list) or not all(isinstance(x, str) for x in images):
        raise UsageError(f"{where} has no list matchImages")
    if not isinstance(version, str) or not version.startswith(f"{_API}/"):
        raise UsageError(f"{where} has apiVersion {version!r}, not {_API}/v1")
    if found.get("tokenAttributes"):
        raise UsageError(
            f"{where} wants tokens of the pods' service accounts (tokenAttributes)",
            hint="only the kubelet has those: leave it out here",
        )
    life_s = _seconds(found.get("defaultCacheDuration"))
    args, env = found.get("args") or [], found.get("env") or []
    try:
        return Plugin(
            program=program,
            images=images,
            life_s=0.0 if life_s is None else life_s,
            version=version,
            args=[str(each) for each in args],
            env={str(each["name"]): str(each["value"]) for each in env},
        )
    except (TypeError, KeyError) as error:
        raise UsageError(f"{where} has args or env that are no lists") from error


def _seconds(value: object) -> float | None:
    """Return a duration as Go writes it, such as 1h30m0s. None: there is none."""
    if not isinstance(value, str):
        return None
    parts = _DURATION.findall(value)
    if "".join(number + unit for number, unit in parts) != value or not parts:
        return 0.0
    return sum(float(number) * _UNITS_S.get(unit, 0.0) for number, unit in parts)


def matches(pattern: str, image: str) -> bool:
    """Return whether the kubelet would take an image, REGISTRY/REPOSITORY, for one of
    ``pattern``: as many parts of the host, each of which may have ``*``; the same port;
    the beginning of the path."""
    try:
        wanted, given = (
            urlsplit(f"//{x.partition('://')[2] or x}") for x in (pattern, image)
        )
    except ValueError:  # such as "[bad"
        return False
    return host_matches(wanted.netloc, given.netloc) and given.path.startswith(
        wanted.path
    )


class KubeletLogins:
    """The logins of images, in files in ``directory``, which only this user may read;
    a thread renews them until close(). Methods may be called by several threads."""

    def __init__(
        self, directory: Path, plugins: Sequence[Plugin], access: RegistryAccess
    ) -> None:
        self._directory = directory
        self._plugins = plugins
        self._access = access
        self._lock = threading.Lock()
        self._due_s: dict[Reference, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="logins", daemon=True)
        if plugins:
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._plugins:
            self._thread.join(_TIMEOUT_S)

    def _plugin_of(self, place: str) -> Plugin | None:
        return next(
            (x for x in self._plugins if any(matches(y, place) for y in x.images)), None
        )

    def _path(self, place: str) -> Path:
        name = hashlib.sha256(place.encode()).hexdigest()[:16]
        return self._directory / f"{name}.json"

    def access(self, reference: Reference, *, fresh: bool = True) -> RegistryAccess:
        """Return how to get to a registry, with the login that a plugin gives, or else
        with the usual one. Raises BtrfsUblkError when the plugin fails, and there is no
        earlier login. Without ``fresh`` an earlier one is taken as it is."""
        access = self._access.of(reference.registry)
        image = replace(reference, tag=None, digest=None)
        plugin = self._plugin_of(image.place)
        if plugin is None:
            return access
        path = self._path(image.place)
        with self._lock:
            due_s = self._due_s.setdefault(image, 0.0)
        if path.exists() and (not fresh or time.monotonic() < due_s):
            return replace(access, docker_config=path)
        try:
            self._ask(plugin, image, path)
        except BtrfsUblkError as error:
            if not path.exists():
                if fresh:
                    raise
                return access
            log.warning("the last login for %s is kept: %s", image.place, str(error))
        return replace(access, docker_config=path)

    def forget(self, reference: Reference) -> None:
        """Forget the login of an image that is not used any more."""
        image = replace(reference, tag=None, digest=None)
        with self._lock:
            self._due_s.pop(image, None)
            self._path(image.place).unlink(missing_ok=True)

    def retain(self, references: Iterable[Reference]) -> None:
        """Remove the logins of all other images, which a process before has left."""
        kept = {self._path(one.place) for one in references}
        with suppress(OSError):
            for path in set(self._directory.iterdir()) - kept:
                path.unlink()

    def _ask(self, plugin: Plugin, image: Reference, path: Path) -> None:
        request = {
            "apiVersion": plugin.version,
            "kind": "CredentialProviderRequest",
            "image": image.place,
        }
        due_s = time.monotonic() + _LEAST_S  # of the next try, after a failure
        try:
            answer = run(
                [plugin.program, *plugin.args],
                input=json.dumps(request),
                timeout_s=_TIMEOUT_S,
                env={**os.environ, **plugin.env},
                hint="it is asked as the kubelet does: see its own messages",
            )
            auths, life_s = _read_answer(answer.stdout, plugin, image.place)
            with self._lock:
                if image not in self._due_s:
                    return  # it was forgotten meanwhile
                self._write(path, image, auths)
            due_s = time.monotonic() + max(life_s * _RENEWED_AFTER, _LEAST_S)
        finally:
            with self._lock:
                if image in self._due_s:
                    self._due_s[image] = due_s

    def _write(self, path: Path, image: Reference, auth: dict[str, str] | None) -> None:
        if auth is None:
            # It knows none: the usual one counts.
            usual = self._access.docker_config
            config = config_of(image.registry, image.repository, usual)
        else:
            key = HUB_ENTRY if image.registry == HUB else image.registry
            config = {"auths": {key: auth}}
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            data = json.dumps(config).encode()
            write_new(path, data, mode=0o600, replace=True, synced=True)
        except OSError as error:
            raise BtrfsUblkError(f"cannot write {path}: {error.strerror}") from error

    def _renew(self) -> None:
        while not self._ended.wait(1.0):
            now_s = time.monotonic()
            with self._lock:
                due = [image for image, due_s in self._due_s.items() if due_s < now_s]
            for image in due:
                plugin = self._plugin_of(image.place)
                if plugin is None or self._ended.is_set():
                    continue
                try:
                    self._ask(plugin, image, self._path(image.place))
                except Exception as error:  # the logins of others are renewed
                    log.warning(
                        "the login for %s is not renewed: %s", image.place, str(error)
                    )


def _read_answer(
    text: str, plugin: Plugin, place: str
) -> tuple[dict[str, str] | None, float]:
    """Return a user and a password, or None, and for how long they are good."""
    try:
        found = json.loads(text) if len(text) <= _MAX_BYTES else None
    except ValueError:
        found = None
    # NB: do not show the answer, which has secrets.
    if not isinstance(found, dict) or found.get("kind") != "CredentialProviderResponse":
        raise BtrfsUblkError(f"{plugin.program} answers with no response of its kind")
    life_s = _seconds(found.get("cacheDuration"))
    life_s = plugin.life_s if life_s is None else life_s
    auths = found.get("auth") or {}
    # As the kubelet: the last in the order of names is the most specific.
    for pattern in sorted(auths if isinstance(auths, dict) else (), reverse=True):
        given = auths[pattern]
        match given:
            case {"username": str(user), "password": str(password)} if matches(
                pattern, place
            ):
                return {"username": user, "password": password}, life_s
    return None, life_s
