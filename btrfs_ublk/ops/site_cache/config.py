"""The configuration of nginx, 1.22 or later, for one ring of caches: what stands within
``http { }``, as of a file in /etc/nginx/conf.d."""

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
        return _Template(_CONFIGURATION).substitute(
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


_CONFIGURATION = """\
# Caches in front of origins, for btrfs-ublk: made by `btrfs-ublk site-cache config`.
# It belongs within http { }, as a file in /etc/nginx/conf.d, on each node of the ring.

# What is stored: slices of %slice_text, which should be the unit of the sources.
proxy_cache_path %directory levels=1:2 keys_zone=btrfs_ublk_data:64m
    max_size=%max_size inactive=30d use_temp_path=off;
# What an origin has said of a caller and an object.
proxy_cache_path %directory.callers levels=1:2 keys_zone=btrfs_ublk_may:16m
    max_size=64m inactive=1h use_temp_path=off;

%origins

# Other hosts are not asked: this is no open proxy.
%uses

# Requests for a slice that is not here yet.
limit_conn_zone "$http_host$request_uri $http_range" zone=btrfs_ublk_fetches:4m;

# What has waited for a slice at the fetcher is said as the fetcher says it.
map $upstream_cache_status $btrfs_ublk_status {
    HIT     HIT;
    default $upstream_http_x_site_cache;
}

upstream btrfs_ublk_ring {
    # What one worker process finds out of a node, all of them know.
    zone btrfs_ublk_ring %zone;
    hash $http_host$uri$slice_range consistent;
%ring
}

# The front, which hosts ask.
server {
    listen %front;
%tls    access_log off;
    client_max_body_size 1;
    proxy_http_version 1.1;
    proxy_ssl_server_name on;
    proxy_ssl_name $btrfs_ublk_name;
    proxy_ssl_verify on;
    proxy_ssl_verify_depth 4;
    proxy_ssl_trusted_certificate %origin_ca;

    location / {
        if ($btrfs_ublk_url = "") { return 421; }
        limit_except GET { deny all; }
%may        slice %slice;
        proxy_pass http://btrfs_ublk_ring;
        proxy_set_header Connection "";
        proxy_set_header Host $http_host;
        proxy_set_header Range $slice_range;
        # A node that is gone, and not an origin that fails. A store answers within
        # half a second, if only that it lacks the slice yet. So one that does not, in
        # a second more, is silent: it is not asked for a while, and who asks again
        # gets the slice of another.
        proxy_next_upstream error;
        proxy_next_upstream_tries 2;
        proxy_connect_timeout 1s;
        proxy_read_timeout 1500ms;
        error_page 504 = @later;
        # A client that gives up must not hide a silent node.
        proxy_ignore_client_abort on;
        proxy_max_temp_file_size 0;
        add_header X-Site-Cache-Slice %slice always;
    }

    # May this caller have this object? Its origin says, which is told of the caller
    # only what the key has, because its answer counts for all who send the same.
    location = /.may {
        internal;
        proxy_pass $btrfs_ublk_url$request_uri;
        proxy_method HEAD;
        proxy_pass_request_body off;
        proxy_pass_request_headers off;
        proxy_set_header Connection "";
        proxy_set_header Host $http_host;
        proxy_set_header Authorization $http_authorization;
        proxy_set_header User-Agent $http_user_agent;
        proxy_set_header Content-Length "";
        proxy_connect_timeout 2s;
        proxy_read_timeout 5s;
        proxy_cache btrfs_ublk_may;
        proxy_cache_convert_head off;
        proxy_cache_key "$http_host$request_uri $http_authorization";
        proxy_ignore_headers Cache-Control Expires Set-Cookie Vary;
        proxy_cache_valid 200 206 301 302 303 307 308 60s;
        proxy_cache_lock on;
        proxy_cache_use_stale error timeout updating
            http_500 http_502 http_503 http_504;
        proxy_intercept_errors on;
        # An origin that would send the caller elsewhere lets it have the object;
        # or sends somebody unknown to a login.
        error_page 301 302 303 307 308 =204 @allowed;
        error_page 400 404 405 410 =403 @refused;
    }
    location @allowed {
        if ($http_authorization = "") { return 403; }
        return 204;
    }
    location @refused { return 403; }
    location @later { return 425; }
}

# The store, which the fronts of all nodes ask. It answers within half a second: with a
# slice that is here, or that comes meanwhile; or with 425, which asks to ask again.
server {
    listen %store;
    access_log off;
%allow
    deny all;
    proxy_http_version 1.1;

    location / {
        if ($btrfs_ublk_url = "") { return 421; }
        # It looks, and the fetcher stores.
        proxy_cache btrfs_ublk_data;
        proxy_cache_key "$http_host$request_uri $http_range";
        proxy_no_cache 1;
        proxy_pass http://%fetcher;
        proxy_set_header Connection "";
        proxy_set_header Host $http_host;
        proxy_set_header Range $http_range;
        proxy_read_timeout 500ms;
        proxy_next_upstream off;
        proxy_max_temp_file_size 0;
        error_page 504 = @later;
        proxy_hide_header X-Site-Cache;
        add_header X-Site-Cache $btrfs_ublk_status always;
    }
    location @later { return 425; }
}

# The fetcher, which the store of the same node asks. It answers when it has got all of
# a slice, so that nobody waits for an origin between two bytes.
server {
    listen %fetcher;
    access_log off;
    allow 127.0.0.0/8;
    deny all;
    limit_conn btrfs_ublk_fetches 8;
    limit_conn_status 425;
    proxy_http_version 1.1;
    proxy_ssl_server_name on;
    proxy_ssl_name $btrfs_ublk_name;
    proxy_ssl_verify on;
    proxy_ssl_verify_depth 4;
    proxy_ssl_trusted_certificate %origin_ca;
    resolver %resolver;
    proxy_set_header Connection "";
    proxy_set_header Host $http_host;
    proxy_set_header Range $http_range;
    proxy_connect_timeout 3s;
    proxy_read_timeout 30s;
    proxy_ignore_client_abort on;

    # One fetch of a slice for all who wait for it, and none once it is there.
    proxy_cache_key "$http_host$request_uri $http_range";
    proxy_cache_valid 206 30d;
    proxy_cache_lock on;
    proxy_cache_lock_timeout 60s;
    proxy_cache_lock_age 30s;
    proxy_ignore_headers Cache-Control Expires Set-Cookie Vary X-Accel-Expires;
    proxy_cache_use_stale error timeout updating http_500 http_502 http_503 http_504;
    proxy_max_temp_file_size 1024m;

    location / {
        if ($btrfs_ublk_url = "") { return 421; }
        # It ends when the slice is stored; what it says of failures is not exact.
        auth_request /.fetch;
        auth_request_set $btrfs_ublk_fetched $upstream_cache_status;
        error_page 401 403 500 = @failed;
        proxy_cache btrfs_ublk_data;
        proxy_pass $btrfs_ublk_url;
        add_header X-Site-Cache $btrfs_ublk_fetched always;
    }

    location = /.fetch {
        internal;
        proxy_cache btrfs_ublk_data;
        proxy_pass $btrfs_ublk_url$request_uri;
        proxy_intercept_errors on;
        error_page 301 302 303 307 308 = @elsewhere;
    }

    # Where an origin has its objects. The caller's credentials do not go there.
    location @elsewhere {
        set $btrfs_ublk_target $upstream_http_location;
        proxy_cache btrfs_ublk_data;
        proxy_pass $btrfs_ublk_target;
        proxy_ssl_name $proxy_host;
        proxy_set_header Connection "";
        proxy_set_header Host $proxy_host;
        proxy_set_header Range $http_range;
        proxy_set_header Authorization "";
        proxy_set_header Cookie "";
    }

    # What the origin has refused it says itself.
    location @failed {
        proxy_pass $btrfs_ublk_url;
    }
}
"""
