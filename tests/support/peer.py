"""Programs of others that data are fetched from: how they come here, and how they run.

``tests/system/peers/peers.py`` lists them.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol
from urllib.parse import urljoin

import requests
from support.processes import ending_with_us, free_ports, stop
from support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server
from support.waiting import wait_until

from btrfs_ublk.content import Source

#: Outside of the tree, as what other tests build.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
PACKAGES = CACHE / "btrfs-ublk" / "peers"
INSTALL_TIMEOUT_S = 280
Command = list[str | Path]


class Package(Protocol):
    """A pinned package, with one program."""

    def install(self) -> str | None:
        """Have it here; the reason why that cannot be."""

    def program(self) -> Path: ...

    def version(self) -> str: ...


@dataclass(frozen=True)
class Debian:
    """A package of the distribution, of whatever version that has; scripts/setup
    installs it."""

    name: str
    path: str

    def install(self) -> str | None:
        if self.program().exists():
            return None
        return f"there is no {self.path} (install the package {self.name})"

    def program(self) -> Path:
        return Path(self.path)

    def version(self) -> str:
        found = subprocess.run(
            ["dpkg-query", "-W", "-f", "${Version}", self.name],
            capture_output=True,
            text=True,
        )
        return f"{found.stdout or 'unknown'} of Debian"


@dataclass(frozen=True)
class _Pinned(ABC):
    """``name`` as the registry has it. Its own client installs it, below PACKAGES."""

    name: str
    pin: str
    path: str
    client: ClassVar[str]
    registry: ClassVar[str]

    @property
    def root(self) -> Path:
        name = re.sub("[:/]", "-", self.name)  # Java would split a path at a colon
        return PACKAGES / self.client / f"{name}-{self.pin}"

    def program(self) -> Path:
        return self.root / self.path

    def version(self) -> str:
        return f"{self.pin} of {self.registry}"

    @abstractmethod
    def argv(self, root: Path) -> Command:
        """The command that installs it below ``root``."""

    def install(self) -> str | None:
        if self.program().exists():
            return None
        if not shutil.which(self.client):
            return f"{self.client} is not on PATH, which brings {self.name}"
        partial = self.root.with_name(f"{self.root.name}.{os.getpid()}")
        (partial / "home").mkdir(parents=True)
        done = subprocess.run(
            self.argv(partial),
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            env=os.environ | {"GOBIN": str(partial)},
        )
        if done.returncode:
            shutil.rmtree(partial)
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            return f"{self.client} cannot install {self.name} {self.pin}: {last}"
        if not self.root.exists():
            partial.rename(self.root)
        shutil.rmtree(partial, ignore_errors=True)
        return None


class Npm(_Pinned):
    client, registry = "npm", "npm"

    def argv(self, root: Path) -> Command:
        quiet: Command = ["--no-audit", "--no-fund", "--ignore-scripts"]
        return ["npm", "install", "--prefix", root, *quiet, f"{self.name}@{self.pin}"]


class Pypi(_Pinned):
    client, registry = "pip", "PyPI"

    def argv(self, root: Path) -> Command:
        there: Command = ["install", "--quiet", "--target", root]
        return [sys.executable, "-m", "pip", *there, f"{self.name}=={self.pin}"]


class Go(_Pinned):
    """``name`` is the path of the program in its module."""

    client, registry = "go", "Go's modules"

    def argv(self, root: Path) -> Command:
        return ["go", "install", f"{self.name}@v{self.pin}"]


class Maven(_Pinned):
    """``name`` is group:artifact; ``path`` is a JAR with all that it needs."""

    client, registry = "mvn", "Maven Central"

    def argv(self, root: Path) -> Command:
        what = f"-Dartifact={self.name}:{self.pin}:jar:jar-with-dependencies"
        return ["mvn", "-q", "dependency:copy", what, f"-DoutputDirectory={root}"]


@dataclass(kw_only=True)
class Peer(ABC):
    """A server. ``words`` run it, with a ``configuration`` in a file, see peers.py.
    ``otherwise`` has the checks (test_peers.py) that do not end as with most: the
    beginning of what they say, and ``notes`` why that is so."""

    name: str
    package: Package
    words: Sequence[str] = ()
    configuration: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    otherwise: Mapping[str, str] = field(default_factory=dict)
    notes: str = ""
    kind: ClassVar[str] = ""

    root: Path = field(init=False)
    port: int = field(init=False)
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def files(self) -> Path:
        """The directory that a web server serves, and that others keep data in."""
        return self.root / "files"

    def install(self) -> str | None:
        return self.package.install()

    def version(self) -> str:
        return self.package.version()

    def start(self, root: Path) -> None:
        """Serve ``root``/files, and return when it listens."""
        self.root = root
        self.files.mkdir(exist_ok=True)
        (self.port,) = free_ports(1)
        self.start_again()

    def names(self) -> dict[str, object]:
        """What ``words`` and ``configuration`` may have in braces."""
        return {
            "program": self.package.program(),
            "configuration": self.root / "configuration",
            **{"port": self.port, "root": self.root, "files": self.files},
        }

    def command(self) -> Command:
        names = self.names()
        text = self.configuration.format_map(names)
        (self.root / "configuration").write_text(text)
        return [word.format_map(names) for word in self.words]

    def start_again(self) -> None:
        """At the same port."""
        with (self.root / "log").open("ab") as log:
            process = self._process = subprocess.Popen(
                ending_with_us(self.command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.root,
                env=os.environ | {"HOME": str(self.root)} | self.environment,
            )

        def listens() -> bool:
            assert process.poll() is None, self.log()
            try:
                return bool(requests.get(self.url, timeout=9).status_code)
            except requests.RequestException:
                return False

        wait_until(listens, self.log)
        self.prepare()

    def prepare(self) -> None:
        """Make what is wanted before data are put."""

    def log(self) -> str:
        return (self.root / "log").read_text(errors="replace")

    def stop(self) -> None:
        if self._process is not None:
            stop(self._process)

    def replace(self, name: str, data: bytes) -> str | None:
        """Put other bytes in place of an object; the reason why that cannot be."""
        self.put(name, data)
        return None

    @abstractmethod
    def put(self, name: str, data: bytes) -> Source:
        """Store an object, or another one in its place; return it as a source."""

    @abstractmethod
    def absent(self) -> Source:
        """A source that is not there."""


class Web(Peer):
    """It serves the files of a directory."""

    kind = "web"

    def put(self, name: str, data: bytes) -> Source:
        path = self.files / name
        new = path.with_name(f".{name}")
        new.write_bytes(data)
        if path.exists():
            # A date has whole seconds, and nobody replaces a file within one.
            os.utime(new, (time.time(), path.stat().st_mtime + 2))
        else:
            os.utime(new, (time.time(), time.time() - 3600))
        new.rename(path)
        return {"kind": "http", "url": f"{self.url}/{name}"}

    def absent(self) -> Source:
        return {"kind": "http", "url": f"{self.url}/absent"}


class Store(Peer):
    """It has the protocol of S3."""

    kind = "S3"

    @property
    def _server(self) -> S3Server:
        return S3Server(self.port)

    def prepare(self) -> None:
        login = f"aws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}"
        (self.root / "login").touch(mode=0o600)
        (self.root / "login").write_text(f"[default]\n{login}\n", encoding="utf-8")
        wait_until(lambda: self._server.make_bucket(BUCKET), self.log)

    def _source(self, key: str) -> Source:
        return {
            "kind": "s3",
            "endpoint": self._server.endpoint,
            "bucket": BUCKET,
            "key": key,
            "credentials_file": str(self.root / "login"),
        }

    def put(self, name: str, data: bytes) -> Source:
        self._server.put(BUCKET, name, data)
        return self._source(name)

    def absent(self) -> Source:
        return self._source("absent")


class Registry(Peer):
    """It keeps blobs of images, by their digests."""

    kind = "registry"
    _repository = "some/image"

    def put(self, name: str, data: bytes) -> Source:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        uploads = f"{self.url}/v2/{self._repository}/blobs/uploads/"
        begun = requests.post(uploads, timeout=9)
        there = urljoin(uploads, begun.headers["Location"])
        done = requests.put(there, data, params={"digest": digest}, timeout=60)
        done.raise_for_status()
        return self._source(digest)

    def replace(self, name: str, data: bytes) -> str | None:
        return "cannot be: named by its digest"

    def absent(self) -> Source:
        return self._source(f"sha256:{'0' * 64}")

    def _source(self, digest: str) -> Source:
        return {
            "kind": "oci",
            "registry": self.url.removeprefix("http://"),
            "repository": self._repository,
            "digest": digest,
            "insecure": True,
        }
