"""An HTTP server of metrics."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from btrfs_ublk.base.log import log
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.ops.monitor.metrics import device_registry

#: Clients that send nothing for this long are disconnected.
_CLIENT_TIMEOUT_S = 10
_PORTS = range(65536)
#: A signal just before the wait does not end it, so the wait must be short.
_POLL_S = 0.5


@dataclass(frozen=True)
class Address:
    """Where to listen."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse "127.0.0.1:9469" or "[::1]:9469". Raises UsageError."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or int(port) not in _PORTS:
            raise UsageError(
                f"'{text}' is no address to listen on",
                hint="127.0.0.1:9469, or [::1]:9469",
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("metrics: " + format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics: a client went away", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def metrics_server(address: Address) -> WSGIServer:
    """Return a listening server; a port of 0 means any free one."""
    kind = _Server6 if ":" in address.host else _Server
    app = make_wsgi_app(device_registry(), disable_compression=True)
    try:
        return make_server(address.host, address.port, app, kind, _Handler)
    except OSError as error:
        raise BtrfsUblkError(f"cannot listen on {address}: {error.strerror}") from error


def serve_metrics(address: Address) -> None:
    """Answer scrapers until a signal comes; prints the address to stdout."""
    with metrics_server(address) as server:
        where = Address(address.host, server.server_port)
        print(f"listening on {where}", flush=True)
        server.serve_forever(poll_interval=_POLL_S)
