"""A web server of one object on loopback, which spoils a chosen share of its
answers, as real servers and networks do when they fail."""

from __future__ import annotations

import random
import re
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, get_args

Fault = Literal[
    "error-503", "reset", "short", "wrong-length", "corrupt", "delay", "hang"
]
FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True)
class Faults:
    """Which faults to inject. ``kind`` None means none."""

    kind: Fault | None = None
    share: float = 0.0  #: of the requests, 0 to 1
    delay_s: float = 5.0  #: of "delay", before the answer
    hang_s: float = 60.0  #: of "hang", in the midst of the answer


class SpoilingServer(ThreadingHTTPServer):
    """Context manager. ``faults`` may be changed at any time, for requests that come
    later; ``injected`` counts them."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, data: bytes, *, seed: int = 1) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.data, self.faults = data, Faults()
        self.injected: Counter[str] = Counter()
        self.ended = threading.Event()
        self._chances = random.Random(seed)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))

    def __enter__(self) -> SpoilingServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/object"

    def draw(self) -> Fault | None:
        """Choose the fault for the request that just came, and count it."""
        faults = self.faults
        if faults.kind is None or self._chances.random() >= faults.share:
            return None
        self.injected[faults.kind] += 1
        return faults.kind

    def handle_error(self, *_: object) -> None:
        """The client has closed its connection."""


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SpoilingServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._begin(200, len(self.server.data))

    def do_GET(self) -> None:
        fault, faults = self.server.draw(), self.server.faults
        if fault == "delay":
            self.server.ended.wait(faults.delay_s)
        if fault == "error-503":
            self._begin(503, 5)
            self.wfile.write(b"sorry")
            return
        whole = self.server.data
        found = re.match(r"bytes=(\d+)-(\d+)$", self.headers.get("Range", ""))
        first, last = map(int, found.groups()) if found else (0, len(whole) - 1)
        body = bytearray(whole[first : last + 1])
        if fault == "wrong-length":  # a valid answer, with less than was asked for
            del body[max(len(body) - 512, 0) :]
        elif fault == "corrupt" and body:
            body[len(body) // 3] ^= 0x10
        ends_early = fault in ("reset", "short", "hang")
        self._begin(206, len(body), f"bytes {first}-{last}/{len(whole)}")
        self.wfile.write(body[: len(body) // 2] if ends_early else body)
        if ends_early:
            self.close_connection = True
        if fault == "hang":
            self.server.ended.wait(faults.hang_s)
        elif fault == "reset":
            # With a linger time of zero, close() sends RST.
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.rfile.close()
            self.connection.close()

    def _begin(self, status: int, length: int, range_: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"it"')
        if range_:
            self.send_header("Content-Range", range_)
        self.end_headers()
