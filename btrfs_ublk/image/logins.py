"""Logins of registries: from where Docker's client and podman keep them, what a refusal
asks for, and the tokens that are got with them.

The same files, keys and helpers as of oci mirrors (csrc/fetch/mirror/docker.c,
login_key.c), and the same challenges (challenge.c); tests/support/tables/ has cases for
both. The processes of one user on one host share tokens: one of them asks the token
server, and the others wait for what it gets, also block servers, whose format it is
(csrc/fetch/mirror/token.h).
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from btrfs_ublk.base.log import log
from btrfs_ublk.base.private_dirs import make_private
from btrfs_ublk.base.process import run
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.device.locks import lock_file
from btrfs_ublk.device.state import RUN_DIRECTORY, RUN_VARIABLE
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
#: How long a token is good, at most.
TOKEN_MAX_S = 86400
#: The process that asks may have died.
_ASKING_S, _FAILED_S = 10.0, 1.0
_LOOK_S = 0.02
_MAX_SHARED_BYTES = 64 << 10
_SCHEME = re.compile(r"[A-Za-z0-9+.-]+:")
#: A word of a challenge, which may have a value; "=" behind it is not valid.
_WORD = re.compile(
    r"""[ \t,]*([^ \t,=]*)
    (?:[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|(?!")([^ \t,]*)))?""",
    re.DOTALL | re.VERBOSE,
)
_EQUALS = re.compile(r"[ \t]*=")


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


def basic(login: Login) -> str:
    """Return the header Authorization by which a password is sent."""
    pair = f"{login.user}:{login.password or ''}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


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
    # Either of them replaces all others.
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


@dataclass(frozen=True)
class Challenge:
    """What a registry takes: tokens, which ``realm`` gives, or a password (``basic``).
    The realm is a URL; None where tokens are wanted that nobody gives."""

    bearer: bool = False
    realm: str | None = None
    service: str | None = None
    scope: str | None = None
    basic: bool = False

    @property
    def wants_token(self) -> bool:
        return self.realm is not None or (self.bearer and not self.basic)


def parse_challenges(text: str, base: str) -> Challenge:
    """Return what the headers of a refusal say, joined by commas. A realm may be
    relative to ``base``, the URL that was refused."""
    schemes: list[tuple[str, dict[str, str]]] = []
    for name, value in _words(text):
        if value is None:
            schemes.append((name, {}))
        elif schemes:
            schemes[-1][1].setdefault(name, value)
    tokens = [given for name, given in schemes if name == "bearer"]
    given = next((x for x in tokens if "realm" in x), tokens[-1] if tokens else {})
    realm = given.get("realm")
    return Challenge(
        bearer=bool(tokens),
        realm=None if realm is None else _resolved(base, realm),
        service=given.get("service"),
        scope=given.get("scope"),
        basic=any(name == "basic" for name, _ in schemes),
    )


def _resolved(base: str, realm: str) -> str:
    if _SCHEME.match(realm):
        return realm
    try:
        return urljoin(base, realm)
    except ValueError:  # such as "//[bad"
        return ""


def _words(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield each scheme with None, and each parameter with its value, up to what is not
    valid."""
    text, at = text.rstrip(" \t,"), 0
    while at < len(text):
        found = _WORD.match(text, at)
        assert found is not None
        name, quoted, plain = found.groups()
        at = found.end()
        if quoted is None and plain is None and _EQUALS.match(text, at):
            return
        value = plain if quoted is None else re.sub(r"(?s)\\(.)", r"\1", quoted)
        yield name.lower(), value


class SharedToken:
    """A token for what ``texts`` say; they may have secrets."""

    def __init__(self, texts: Sequence[str]) -> None:
        data = b"".join(text.encode() + b"\0" for text in texts)
        self._name = hashlib.sha256(data).hexdigest()
        self._path: Path | None = None

    def find(self, *, refused: str | None) -> tuple[str, float] | None:
        """Return a token, and until when it is good (time.monotonic()); None: it is the
        caller's to ask for one, and to ``tell``. Waits while somebody else asks, and
        for a second after the token server has failed."""
        late_s = time.monotonic() + _ASKING_S
        while time.monotonic() < late_s:
            with self._locked() as fd:
                if fd is None:
                    return None
                record = _read_record(fd)
                now_ns = time.monotonic_ns()
                token, until_ns = _token(record)
                if token is not None and until_ns > now_ns and token != refused:
                    return token, until_ns / 1e9
                waits_ns = max(
                    _time(record, "asking_ns", most_s=_ASKING_S),
                    _time(record, "failed_ns", most_s=_FAILED_S),
                )
                if waits_ns <= now_ns:
                    _write_record(fd, {"asking_ns": now_ns + int(_ASKING_S * 1e9)})
                    return None
            time.sleep(_LOOK_S)
        return None

    def tell(self, token: str | None, until_s: float = 0.0) -> None:
        """Tell what was got; None: the token server has failed."""
        record: dict[str, Any] = {"until_ns": int(until_s * 1e9), "asking_ns": 0}
        if token is None:
            record["failed_ns"] = time.monotonic_ns() + int(_FAILED_S * 1e9)
        elif len(token) <= _MAX_SHARED_BYTES:
            record["token"] = token
        with self._locked() as fd:
            if fd is None:
                return
            # A failure takes no token away that another one has got meanwhile: who asks
            # leaves none that is bad.
            if "token" not in record:
                found, found_until_ns = _token(_read_record(fd))
                if found is not None and found_until_ns > time.monotonic_ns():
                    return
            _write_record(fd, record)

    @contextmanager
    def _locked(self) -> Iterator[int | None]:
        """Yield the file's descriptor; None where nothing can be shared."""
        lock = None
        with suppress(OSError, BtrfsUblkError):
            # NB: `device gc` may remove it meanwhile, and lock_file() sees that.
            lock = lock_file(self._directory() / self._name, timeout_s=_ASKING_S)
        if lock is None:
            yield None
        else:
            with lock:
                yield lock.fileno()

    def _directory(self) -> Path:
        if self._path is None:
            base = Path(os.environ.get(RUN_VARIABLE) or RUN_DIRECTORY)
            for directory in (base, base / "tokens"):
                make_private(directory, what="directory of tokens", hint="run as root")
            self._path = base / "tokens"
        return self._path


def _read_record(fd: int) -> dict[str, Any]:
    """What makes no sense, as of a process that was killed while it wrote, is as good
    as nothing."""
    try:
        record = json.loads(os.pread(fd, 2 * _MAX_SHARED_BYTES, 0))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _token(record: dict[str, Any]) -> tuple[str | None, int]:
    """A token, and until when it is good."""
    token = record.get("token")
    until_ns = _time(record, "until_ns", most_s=TOKEN_MAX_S)
    return (token if isinstance(token, str) else None), until_ns


def _time(record: dict[str, Any], key: str, *, most_s: float) -> int:
    """A time that is further ahead is of before a boot, after which the clock begins
    anew."""
    value = record.get(key)
    latest_ns = time.monotonic_ns() + int(most_s * 1e9)
    return value if isinstance(value, int) and value <= latest_ns else 0


def _write_record(fd: int, record: dict[str, Any]) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(record).encode(), 0)
