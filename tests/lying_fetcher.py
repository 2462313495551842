"""What the fetch process must not be able to do: a program in its place that lies.

``program()`` makes one. The first ``times`` that it is started, it does what ``lie``
names; after that it is honest, and brings the bytes of a file.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

#: csrc/lazy/process/channel.h
SLOTS, WINDOW_BYTES = 128, 512 << 10
CANCEL, TAKEN, PING = 2, 3, 5
START, HELLO, IDENTITY, ARRIVED, OVER, ASK_LOGIN, EVENT, PONG = 1, *range(6, 13)
_HEAD = struct.Struct("=IHH")
_START = struct.Struct("=QQIII4x")
_OVER = struct.Struct("=iIIII")


class Peer:
    def __init__(self, data: Path) -> None:
        self.stream = socket.socket(fileno=3)
        self.windows = mmap.mmap(4, SLOTS * WINDOW_BYTES)
        self.data = data.read_bytes()
        self.slot = self.offset = self.length = 0
        self.messages = self.stream.makefile("rb")
        self.send(HELLO, struct.pack("=II", 1, 0))

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
        self.send(OVER, _OVER.pack(result, failure, 0, count, 0) + text)

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

    def fall_back(self) -> None:
        self.arrived(100)
        self.arrived(50)

    def name_late(self) -> None:
        self.arrived(1)
        self.send(IDENTITY, b"etag x\0")

    def half_a_message(self) -> None:
        self.stream.sendall(_HEAD.pack(100, OVER, self.slot) + b"half")
        os._exit(0)

    def serve(self, answer: Callable[[Peer], object]) -> None:
        while True:
            op, slot, body = self.receive()
            if op == START:
                self.slot = slot
                self.offset, _, _, self.length, _ = _START.unpack_from(body)
                answer(self)


#: Each is no message that the real one sends, so that it is killed for it.
LIES: dict[str, Callable[[Peer], object]] = {
    "a slot that does not exist": lambda it: it.arrived(1, slot=60000),
    "a slot without a run": lambda it: it.arrived(1, slot=it.slot + 1),
    "more than was asked for": lambda it: it.arrived(it.length + 1),
    "more than fits into the window": lambda it: it.arrived(WINDOW_BYTES + 1),
    "less than before": Peer.fall_back,
    "all, but without bytes": lambda it: it.over(count=0),
    "an unknown failure": lambda it: it.over(-5, 77),
    "no errno": lambda it: it.over(5),
    "another errno": lambda it: it.over(-(2**31)),
    "a text without an end": lambda it: it.over(-5, 0, b"text"),
    "a short message": lambda it: it.send(OVER, b"x"),
    "a long message": lambda it: it.stream.sendall(_HEAD.pack(2**32 - 1, OVER, 0)),
    "an unknown message": lambda it: it.send(999),
    "the server's own message": lambda it: it.send(START, bytes(40)),
    "a login of nobody": lambda it: it.send(ASK_LOGIN, struct.pack("=I", 4000)),
    "an identity of two lines": lambda it: it.send(IDENTITY, b"etag\nx\0"),
    "an identity afterwards": Peer.name_late,
    "an event of others": lambda it: it.send(EVENT, b"given_up\0all is lost\0"),
    "another version": lambda it: it.send(HELLO, struct.pack("=II", 99, 0)),
    "the end twice": Peer.early_and_late,
    "half a message": Peer.half_a_message,
    "its end": lambda it: os._exit(1),
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
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from lying_fetcher import main\nmain(*{json.dumps(arguments)})\n"
    )
    path.chmod(0o755)
    return path


def main(data: str, lie: str, times: int, count: str) -> None:
    with open(count, "ab") as lies:
        told = lies.tell()
        lies.write(b".")
    peer = Peer(Path(data))
    peer.serve(Peer.bring if told >= times else (LIES | OTHERS)[lie])
