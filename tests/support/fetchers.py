"""What the fetch process must not be able to do: a program in its place that lies.

``program()`` makes one. The first ``times`` that it is started, it does what ``lie``
names; after that it is honest, and brings the bytes of a file. Below it are data that
sources have for the true one.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.paths import TESTS
from support.shells import FetchShell
from support.web_servers import Script, ScriptedServer, ranged, scripted_server

from btrfs_ublk.units import MIB

#: csrc/fetch/process/channel.h
SLOTS, WINDOW_BYTES = 128, 512 << 10
START, TAKEN, INQUIRE, PING = 1, 3, 5, 6
HELLO, IDENTITY, ARRIVED, OVER, ASK_LOGIN, ANSWER, EVENT, PONG, WHOLE, TOKEN = range(
    7, 17
)
VERSION, OF_INQUIRY = 7, 1 << 31
_HEAD = struct.Struct("=IHH")
_START = struct.Struct("=QQIIIIII")
_OVER = struct.Struct("=iIIIIII")
_ANSWER = struct.Struct("=Qi4x")


class Peer:
    def __init__(self, data: Path) -> None:
        self.stream = socket.socket(fileno=3)
        self.windows = mmap.mmap(4, SLOTS * WINDOW_BYTES)
        self.data = data.read_bytes()
        self.slot = self.offset = self.length = 0
        self.messages = self.stream.makefile("rb")
        self.send(HELLO, struct.pack("=II", VERSION, 0))

    def receive(self) -> tuple[int, int, bytes]:
        """Return the next message but pings: its kind, slot and body."""
        while head := self.messages.read(_HEAD.size):
            count, op, slot = _HEAD.unpack(head)
            body = self.messages.read(count)
            if op != PING:
                return op, slot, body
            self.send(PONG)
        os._exit(0)

    def send(self, op: int, body: bytes = b"", *, slot: int | None = None) -> None:
        slot = self.slot if slot is None else slot
        self.stream.sendall(_HEAD.pack(len(body), op, slot) + body)

    def fill(self, data: bytes) -> None:
        start = self.slot * WINDOW_BYTES
        self.windows[start : start + len(data)] = data

    def wanted(self) -> bytes:
        return self.data[self.offset :][: self.length]

    def arrived(self, count: int, *, slot: int | None = None) -> None:
        self.send(ARRIVED, struct.pack("=I", count), slot=slot)

    def over(
        self, result: int = 0, failure: int = 0, text: bytes = b"\0", *, count: int = -1
    ) -> None:
        count = self.length if count < 0 else count
        self.send(OVER, _OVER.pack(result, failure, 0, count, 0, 0, 0) + text)

    def bring(self) -> None:
        """Answer as the real one does."""
        sent = taken = 0
        while sent < self.length:
            at = sent % WINDOW_BYTES
            count = min(WINDOW_BYTES - max(at, sent - taken), self.length - sent)
            if count:
                start = self.slot * WINDOW_BYTES + at
                self.windows[start : start + count] = self.wanted()[sent:][:count]
                sent += count
                self.arrived(sent)
                continue
            op, _, body = self.receive()
            if op == TAKEN:
                (taken,) = struct.unpack("=I", body)
        self.over()

    def bring_others(self) -> None:
        self.fill(bytes(self.length))
        self.over()

    def flicker(self) -> None:
        """Change what is being read, for ever."""
        right = self.wanted()
        wrong = bytes(len(right))
        self.fill(right)

        def change() -> None:
            while True:
                self.fill(wrong)
                self.fill(right)

        threading.Thread(target=change, daemon=True).start()
        time.sleep(0.01)
        self.over()

    def early_and_late(self) -> None:
        self.over(-5)
        self.over(-5)

    def answer(
        self,
        result: int = 0,
        texts: bytes = b"\0\0etag x\0\0",
        *,
        slot: int | None = None,
    ) -> None:
        """Answer an inquiry."""
        body = _ANSWER.pack(len(self.data), result) + texts
        self.send(ANSWER, body, slot=slot)

    def ask_login(self, *, slot: int) -> None:
        self.send(ASK_LOGIN, struct.pack("=QIIII", 0, OF_INQUIRY | slot, 1, 0, 0))

    def answer_early(self) -> None:
        self.ask_login(slot=self.slot)
        self.answer()

    def answer_twice(self) -> None:
        self.answer(-5, b"wrong\0\0\0\0")
        self.answer()

    def serve(
        self, answer: Callable[[Peer], object], inquired: Callable[[Peer], object]
    ) -> None:
        while True:
            op, slot, body = self.receive()
            self.slot = slot
            if op == START:
                self.offset, _, _, self.length, *_ = _START.unpack_from(body)
                answer(self)
            elif op == INQUIRE:
                inquired(self)


#: Each is no message that the real one sends, so that it is killed for it. fuzz-front.c
#: has them by the thousand.
LIES: dict[str, Callable[[Peer], object]] = {
    "a slot that does not exist": lambda it: it.arrived(1, slot=60000),
    "a slot without a run": lambda it: it.arrived(1, slot=it.slot + 1),
    "more than was asked for": lambda it: it.arrived(it.length + 1),
    "all, but without bytes": lambda it: it.over(count=0),
    "a text without an end": lambda it: it.over(-5, 0, b"text"),
    "a short message": lambda it: it.send(OVER, b"x"),
    "a long message": lambda it: it.stream.sendall(_HEAD.pack(2**32 - 1, OVER, 0)),
    "a login of nobody": lambda it: it.send(
        ASK_LOGIN, struct.pack("=QIIII", 0, 4000, 1, 0, 0)
    ),
    "an identity of two lines": lambda it: it.send(IDENTITY, b"etag\nx\0"),
    "an event of others": lambda it: it.send(EVENT, b"given_up\0all is lost\0"),
    "another version": lambda it: it.send(HELLO, struct.pack("=II", 99, 0)),
    "the end twice": Peer.early_and_late,
    "its end": lambda it: os._exit(1),
}
#: The same for what is said of a probe, or of a look-up.
INQUIRY_LIES: dict[str, Callable[[Peer], object]] = {
    "a slot that does not exist": lambda it: it.answer(slot=60000),
    "three texts": lambda it: it.answer(0, b"\0\0etag x\0"),
    "a long document": lambda it: it.answer(0, b"\0\0\0" + b" " * (257 << 10) + b"\0"),
    "a login of a slot that does not exist": lambda it: it.ask_login(slot=1 << 20),
    "an answer before its login": Peer.answer_early,
    "its end": lambda it: os._exit(1),
}
#: Only of a probe.
PROBE_LIES: dict[str, Callable[[Peer], object]] = {
    "an identity of two lines": lambda it: it.answer(0, b"\0\0etag\nx\0\0"),
    "a document that nobody wants": lambda it: it.answer(0, b"\0\0\0{}\0"),
}
#: These it may say. Answers that are not as they should be are errors of who asks.
INQUIRY_OTHERS: dict[str, Callable[[Peer], object]] = {
    "no answer": lambda it: None,
    "a text for terminals": lambda it: it.answer(-5, b"red\x1b[31m\0\n\0\0\0"),
    "an answer twice": Peer.answer_twice,
}
#: These it may say; what it brings is found wrong, or waited for in vain.
OTHERS: dict[str, Callable[[Peer], object]] = {
    "other bytes": Peer.bring_others,
    "bytes that change": Peer.flicker,
    "nothing": lambda it: None,
    "honest": Peer.bring,
}


def program(directory: Path, lie: str, data: bytes, *, times: int = 1) -> Path:
    """Make the program."""
    (directory / "lying-data").write_bytes(data)
    arguments = [str(directory / "lying-data"), lie, times, str(directory / "lies")]
    path = directory / "lying-fetcher"
    path.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"sys.path.insert(0, {str(TESTS)!r})\n"
        f"from support.fetchers import main\nmain(*{json.dumps(arguments)})\n"
    )
    path.chmod(0o755)
    return path


def main(data: str, lie: str, times: int, count: str) -> None:
    with open(count, "ab") as lies:
        told = lies.tell()
        lies.write(b".")
    peer = Peer(Path(data))
    if told >= times:
        lie = "honest"
    inquired = INQUIRY_LIES | PROBE_LIES | INQUIRY_OTHERS
    peer.serve((LIES | OTHERS).get(lie, Peer.bring), inquired.get(lie, Peer.answer))


DATA = random.Random(11).randbytes(MIB)

UNIT = 64 << 10


def server_of(request: str) -> bytes:
    """Answer with the range that was asked for."""
    return ranged(request, DATA, 'ETag: "one"')


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server(server_of) as running:
        yield running


@contextmanager
def fetching(
    build: Path, script: Script, *options: str, log: Path | None = None
) -> Iterator[tuple[ScriptedServer, FetchShell]]:
    """Run a server of that script, and a fetch-shell."""
    with scripted_server(script) as made, FetchShell(build, *options, log=log) as shell:
        yield made, shell


def source_of(server: ScriptedServer, **keys: Any) -> dict[str, Any]:
    mirror = {"kind": "http", "url": server.url()}
    return {"size": len(DATA), "unit": UNIT, "mirrors": [mirror]} | keys
