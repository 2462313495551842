"""A web server on loopback that serves a directory, whole or in ranges (RFC 9110).

``python -m btrfs_ublk.testing.range_server DIRECTORY`` prints its URL, and ends by a
signal, or with the process that started it. It is for tests: it has no TLS, and files
must not change while they are read, but may be replaced by rename.
"""

from __future__ import annotations

import ctypes
import email.utils
import json
import os
import re
import signal
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import click

from btrfs_ublk.base.entry import CountType, PathType, run_command

_PR_SET_PDEATHSIG = 1
_CHUNK_BYTES = 256 << 10
#: It matches one range; requests for several get the whole file, as RFC 9110 allows.
_RANGE = re.compile(r"bytes=\s*(\d*)-(\d*)\s*$")


@dataclass(frozen=True)
class Served:
    """One request and its answer: bytes [first, first + length) of a file."""

    method: str
    path: str
    status: int
    first: int
    length: int


def wanted_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Parse a Range header to (first, length); None: the whole file (RFC 9110, 14.1.2).

    Raises ValueError when it begins after the end.
    """
    match = _RANGE.match(header or "")
    if not match or match.groups() == ("", ""):
        return None
    first_text, last_text = match.groups()
    if not first_text:
        length = min(int(last_text), size)
        if length == 0:
            raise ValueError(header)
        return size - length, length
    first = int(first_text)
    last = min(int(last_text), size - 1) if last_text else size - 1
    if last_text and int(last_text) < first:
        return None  # it is not valid, and so ignored
    if first >= size:
        raise ValueError(header)
    return first, last - first + 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, directory: Path, port: int, log: Path | None) -> None:
        self._log: int | None = None
        if log is not None:
            self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        super().__init__(("127.0.0.1", port), partial(_Handler, directory.resolve()))

    def note(self, served: Served) -> None:
        if self._log is not None:
            os.write(self._log, f"{json.dumps(asdict(served))}\n".encode())

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect during an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def __init__(self, directory: Path, *args: object) -> None:
        self._directory = directory
        super().__init__(*args)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, as note() does."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        try:
            path = (self._directory / unquote(urlsplit(self.path).path)[1:]).resolve()
            if self._directory not in path.parents or not path.is_file():
                raise FileNotFoundError(path)
            with path.open("rb") as file:
                self._answer_with(file)
        except (OSError, ValueError) as error:
            if isinstance(error, ConnectionError):
                raise
            self._say(HTTPStatus.NOT_FOUND)

    def _answer_with(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        # NB: with the inode, as a file may be replaced within one tick of its clock.
        tag = f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'
        modified = email.utils.formatdate(status.st_mtime, usegmt=True)
        headers = {"Accept-Ranges": "bytes", "ETag": tag, "Last-Modified": modified}
        if tag in self.headers.get("If-None-Match", ""):
            self._say(HTTPStatus.NOT_MODIFIED, headers)
            return
        header = self.headers.get("Range")
        # Compared as text: a date must be identical (RFC 9110, 13.1.5).
        if self.headers.get("If-Range", tag) not in (tag, modified):
            header = None
        try:
            wanted = wanted_range(header, status.st_size)
        except ValueError:
            headers["Content-Range"] = f"bytes */{status.st_size}"
            self._say(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers)
            return
        first, length = wanted or (0, status.st_size)
        if wanted:
            last = first + length - 1
            headers["Content-Range"] = f"bytes {first}-{last}/{status.st_size}"
        headers["Content-Type"] = "application/octet-stream"
        self._say(
            HTTPStatus.PARTIAL_CONTENT if wanted else HTTPStatus.OK,
            headers,
            first=first,
            length=length,
        )
        if self.command == "GET" and not self._send(file, first, length):
            # NB: else the client would take the next answer for the rest of this one.
            self.close_connection = True

    def _send(self, file: BinaryIO, first: int, length: int) -> bool:
        """Send a range; False when the file has an error, or is shorter than it was."""
        try:
            file.seek(first)
            while length and (data := file.read(min(length, _CHUNK_BYTES))):
                self.wfile.write(data)
                length -= len(data)
        except ConnectionError:
            raise
        except OSError:
            return False
        return not length

    def _say(
        self,
        status: HTTPStatus,
        headers: dict[str, str] | None = None,
        *,
        first: int = 0,
        length: int = 0,
    ) -> None:
        # Noted before the answer, so that its receiver finds it in the log.
        self.server.note(Served(self.command, self.path, status.value, first, length))
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(length))
        self.end_headers()


@click.command()
@click.argument("directory", type=PathType(exists=True, file_okay=False))
@click.option(
    "--port",
    type=CountType(0, 65535),
    default=0,
    help="On 127.0.0.1; by default, any free one.",
)
@click.option(
    "--log",
    type=PathType(dir_okay=False),
    help="Append a line of JSON for each request to this file.",
)
def command(directory: Path, port: int, log: Path | None) -> None:
    """Serve a directory on loopback, whole files and ranges; print the URL."""
    # It must not outlive its parent, even if that is killed (prctl(2)).
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    try:
        server = _Server(directory, port, log)
    except OSError as error:
        raise click.ClickException(f"port {port}: {error.strerror}") from error
    with server:
        click.echo(f"http://127.0.0.1:{server.server_address[1]}/")
        server.serve_forever()


if __name__ == "__main__":
    run_command(command, name="range_server")
