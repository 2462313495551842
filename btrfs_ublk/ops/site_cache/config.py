"""The configuration of nginx, 1.22 or later, for one ring of caches: a file for
/etc/nginx/conf.d, which nginx includes within ``http { }``."""

from __future__ import annotations

import ipaddress
import socket
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from zlib import crc32

from btrfs_ublk.base.hosts import check_cache
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import MIB, format_size

FRONT_PORT, STORE_PORT = 3128, 3130
CACHE_DIRECTORY = "/var/cache/btrfs-ublk-site"
#: Where a node has its fetcher, beside its store: an address of loopback that nobody
#: else has, so that it needs no port of its own.
_FETCHER_HOST = "127.31.30.1"
#: Of those of nodes with files of their own, as a machine may have several.
_FETCHER_NETWORK = ipaddress.ip_network("127.30.0.0/16")
_RESOLV_CONF = Path("/etc/resolv.conf")
_TRUSTED = "/etc/ssl/certs/ca-certificates.crt"
#: Placeholders begin with a percent sign, as nginx uses the dollar.
_TEMPLATE = Path(__file__).with_name("nginx.conf")


@dataclass(frozen=True)
class Node:
    """One nginx of the ring: hosts ask its front, the fronts of all nodes its store."""

    host: str
    front_port: int = FRONT_PORT
    store_port: int = STORE_PORT

    @classmethod
    def parse(cls, text: str, option: str) -> Node:
        """Parse HOST, or HOST:PORT of its front, or HOST:PORT:PORT of its front and its
        store. Raises UsageError, which names the option."""
        host, *ports = text.split(":")
        numbers = [int(x) for x in ports if x.isdecimal() and 0 < int(x) < 65536]
        is_name = host and all(x.isalnum() or x in ".-" for x in host)
        if not is_name or len(numbers) != len(ports) or len(ports) > 2:
            raise UsageError(
                f"{option} {text!r} is no HOST, HOST:PORT or HOST:PORT:PORT",
                hint=f"the ports are {FRONT_PORT} for hosts, {STORE_PORT} for nodes",
            )
        if len(numbers) == 2 and numbers[0] == numbers[1]:
            raise UsageError(f"{option} {text!r} has one port twice")
        return cls(host, *numbers)

    def __str__(self) -> str:
        return f"{self.host}:{self.front_port}:{self.store_port}"

    def addresses(self) -> list[str]:
        """Return its addresses. Raises UsageError."""
        try:
            return [str(ipaddress.ip_address(self.host))]
        except ValueError:
            pass
        try:
            found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(
                f"node {self.host} has no address: {error.strerror}",
                hint="write its address instead",
            ) from error
        return sorted({str(each[4][0]) for each in found})


@dataclass(frozen=True)
class SiteCache:
    """What a configuration is made of. ``this`` is the node that it is for, where nodes
    have several ports; ``public``: nobody is asked whether a caller may read."""

    nodes: Sequence[Node]
    origins: Sequence[str]
    slice_bytes: int
    max_bytes: int
    directory: Path = Path(CACHE_DIRECTORY)
    certificate: Path | None = None
    key: Path | None = None
    origin_ca: Path = Path(_TRUSTED)
    resolvers: Sequence[str] = ()
    this: Node | None = None
    public: bool = False

    def __post_init__(self) -> None:
        if not self.nodes or not self.origins:
            raise UsageError("a ring needs a node and an origin")
        for number, node in enumerate(self.nodes):
            if node in self.nodes[:number]:
                raise UsageError(
                    f"--nodes names {node} twice", hint="leave one of them out"
                )
        for origin in self.origins:
            check_cache(origin, "--origin")
        if self.max_bytes < MIB:
            raise UsageError(
                f"--max-size {self.max_bytes}: nginx counts it in MiB",
                hint="give 1M at least; the default is 50G",
            )
        if (self.certificate is None) != (self.key is None):
            raise UsageError(
                "--certificate and --key belong together", hint="give both, or none"
            )
        paths = {
            "--directory": self.directory,
            "--certificate": self.certificate,
            "--key": self.key,
            "--origin-ca": self.origin_ca,
        }
        for option, path in paths.items():
            if path is not None and not _is_word(str(path)):
                raise UsageError(
                    f"nginx would misunderstand {option} {str(path)!r}",
                    hint="use an absolute one of letters, digits, and _ - . /",
                )
        for each in self.resolvers:
            _resolver(each)
        ports = {(node.front_port, node.store_port) for node in self.nodes}
        if self.this is None and len(ports) > 1:
            raise UsageError(
                "the nodes have several ports, so each has a file of its own",
                hint="name the node that it is for: --this HOST:PORT:PORT",
            )
        if self.this is not None and self.this not in self.nodes:
            raise UsageError(
                f"--this {self.this} is none of the nodes",
                hint=f"--nodes has {', '.join(map(str, self.nodes))}",
            )

    def text(self) -> str:
        """Return the configuration."""
        node = self.this or self.nodes[0]
        listen = f"{node.host}:" if self.this else ""
        tls = " ssl" if self.certificate else ""
        return _Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
            slice=self.slice_bytes,
            slice_text=format_size(self.slice_bytes),
            max_size=f"{self.max_bytes >> 20}m",
            directory=self.directory,
            origins="\n".join(self._origins()),
            uses="\n".join(self._uses()),
            zone=self._zone(),
            ring="\n".join(self._ring()),
            allow="\n".join(f"    allow {each};" for each in self._addresses()),
            front=f"{listen}{node.front_port}{tls}",
            store=f"{listen}{node.store_port}",
            fetcher=f"{self._fetcher_host()}:{node.store_port}",
            tls=self._tls(),
            may="" if self.public else "        auth_request /.may;\n",
            origin_ca=self.origin_ca,
            resolver=" ".join(map(_resolver, self.resolvers or _resolvers())),
        )

    def _fetcher_host(self) -> str:
        if self.this is None:
            return _FETCHER_HOST
        number = crc32(self.this.host.encode()) % (_FETCHER_NETWORK.num_addresses - 2)
        return str(_FETCHER_NETWORK[1 + number])

    def _ring(self) -> list[str]:
        return [
            f"    server {each.host}:{each.store_port} max_fails=1 fail_timeout=10s;"
            for each in self.nodes
        ]

    def _zone(self) -> str:
        """Return how much memory nginx needs for what it knows of the nodes."""
        return f"{max(256, len(self.nodes))}k"

    def _addresses(self) -> list[str]:
        return sorted({x for node in self.nodes for x in node.addresses()})

    def _tls(self) -> str:
        if self.certificate is None:
            return ""
        return (
            f"    ssl_certificate {self.certificate};\n"
            f"    ssl_certificate_key {self.key};\n"
        )

    def _origins(self) -> list[str]:
        lines = []
        for number, origin in enumerate(self.origins):
            parts = urlsplit(origin)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            lines += [
                f"upstream btrfs_ublk_origin_{number} {{",
                f"    server {_bracketed(parts.hostname)}:{port} max_fails=0;",
                "    keepalive 16;",
                "}",
            ]
        return lines

    def _uses(self) -> list[str]:
        """Return rows: of what hosts write in "Host", and whom to ask for it."""
        rows: dict[str, list[str]] = {"url": [], "name": []}
        for number, origin in enumerate(self.origins):
            parts = urlsplit(origin)
            name = parts.netloc
            url = f"{parts.scheme}://btrfs_ublk_origin_{number}"
            rows["url"].append(f'    "{name}" {url};')
            rows["name"].append(f'    "{name}" {_bracketed(parts.hostname)};')
        lines = []
        for what, pairs in rows.items():
            lines += [f"map $http_host $btrfs_ublk_{what} {{", '    default "";']
            lines += [*dict.fromkeys(pairs), "}"]
        return lines


def _bracketed(host: str | None) -> str:
    return f"[{host}]" if host and ":" in host else host or ""


def _is_word(path: str) -> bool:
    return path.startswith("/") and all(x.isalnum() or x in "_-./" for x in path)


def _resolver(text: str) -> str:
    """Return an address as nginx wants it: one of IPv6 has brackets."""
    is_bracketed = text.startswith("[") and text.endswith("]")
    address = text[1:-1] if is_bracketed else text
    try:
        ipaddress.ip_address(address)
    except ValueError as error:
        raise UsageError(
            f"--resolver {text!r} is no address", hint="write one such as 192.0.2.53"
        ) from error
    return _bracketed(address)


def _resolvers() -> list[str]:
    """Return the name servers of this machine."""
    try:
        lines = _RESOLV_CONF.read_text().splitlines()
    except OSError:
        lines = []
    words = [line.split() for line in lines]
    found = [x[1].partition("%")[0] for x in words if x[:1] == ["nameserver"] and x[1:]]
    return found or ["127.0.0.1"]


class _Template(string.Template):
    delimiter = "%"
