"""An HTTP server of metrics, on an address or a Unix socket."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from btrfs_ublk.base.log import log
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.ops.monitor.metrics import device_registry

#: Clients that send nothing for this long are disconnected.
_CLIENT_TIMEOUT_S = 10
_CLIENTS_MAX = 8
_BACKLOG = 16
_PORTS = range(65536)
#: A signal just before the wait does not end it, so the wait must be short.
_POLL_S = 0.5


@dataclass(frozen=True)
class Address:
    """Where to listen: ``path`` is a Unix socket, else ``host`` and ``port``."""

    host: str = ""
    port: int = 0
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse "127.0.0.1:9469", "[::1]:9469" or "/run/metrics.sock"; UsageError."""
        if text.startswith("/"):
            return cls(path=Path(text))
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or int(port) not in _PORTS:
            raise UsageError(
                f"'{text}' is no address to listen on",
                hint="127.0.0.1:9469, [::1]:9469, or a path: /run/metrics.sock",
            )
        return cls(host=host, port=int(port))

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_S

    def address_string(self) -> str:
        return str(self.client_address)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("metrics: " + format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = _BACKLOG

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name = "localhost"
        self.server_port = 0
        self.setup_environ()
        self.set_app(make_wsgi_app(device_registry(), disable_compression=True))
        self._places = threading.BoundedSemaphore(_CLIENTS_MAX)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = self.socket.accept()
        # A Unix socket's address is empty, but wsgiref wants a host name.
        return connection, address or ("local", 0)

    def process_request(self, request: Any, client_address: Any) -> None:
        # Further clients wait here, and then in the listener's queue.
        self._places.acquire()
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread was started that would release it
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics: a client went away", exc_info=True)


@contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    """Listen during the block, and remove a Unix socket after it."""
    try:
        listener = _bound(address)
    except OSError as error:
        raise BtrfsUblkError(f"cannot listen on {address}: {error.strerror}") from error
    with listener:
        try:
            yield listener
        finally:
            if address.path is not None:
                address.path.unlink(missing_ok=True)


def _bound(address: Address) -> socket.socket:
    if address.path is not None:
        return _bound_unix(address.path)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    where = (address.host, address.port)
    return socket.create_server(where, family=family, backlog=_BACKLOG)


def _bound_unix(path: Path) -> socket.socket:
    """Bind a socket that only its owner may connect to, replacing an unused one."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError(f"'{path}' exists, and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
                raise BtrfsUblkError(f"another program listens on '{path}' already")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


@contextmanager
def metrics_server(address: Address) -> Iterator[tuple[_Server, Address]]:
    """Yield the listening server and its address; a port of 0 means any free one."""
    with _listening(address) as listener:
        server = _Server(listener)
        if address.path is None:
            address = Address(address.host, listener.getsockname()[1])
        yield server, address


def serve_metrics(address: Address) -> None:
    """Answer scrapes until a signal comes; prints the address to stdout."""
    with metrics_server(address) as (server, where):
        print(f"listening on {where}", flush=True)
        server.serve_forever(poll_interval=_POLL_S)
