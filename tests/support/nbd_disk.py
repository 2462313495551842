"""A disk for QEMU that logs all writes and flushes, as logged_disk.py does for the
kernel: an NBD server with one export, for one client (doc/proto.md of
https://github.com/NetworkBlockDevice/nbd)."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.logged_disk import punch
from support.power_loss import PUNCH, RECORD, SYNC, WRITE

_GREETING, _REPLY_MAGIC = b"NBDMAGICIHAVEOPT", 0x3E889045565A9
_EXPORT_NAME, _ABORT, _INFO, _GO = 1, 2, 6, 7
_ACK, _INFO_REPLY, _UNSUPPORTED = 1, 3, 1 << 31 | 1
_READ, _WRITE, _DISCONNECT, _FLUSH, _TRIM, _WRITE_ZEROES = 0, 1, 2, 3, 4, 6
#: It has flags, and takes flushes, trims and writes of zeroes. Not FUA, by which single
#: writes would be durable: the client sends a flush instead, as kernels do.
_FLAGS = 1 | 1 << 2 | 1 << 5 | 1 << 6
_REQUEST, _ANSWER = struct.Struct(">IHHQQI"), struct.Struct(">IIQ")
_EINVAL = 22


class LoggedDisk:
    """``under_way``: how many writes no flush has followed."""

    def __init__(self, disk: int, log: int) -> None:
        self._disk, self._log = disk, log
        self.under_way = 0

    def serve(self, client: socket.socket) -> None:
        """Answer one request after the other, so the log has the order of the answers,
        until the client is gone."""
        self._client = client
        try:
            if self._negotiate():
                while self._answer():
                    pass
        except (ConnectionError, EOFError):
            pass  # it was killed

    def _get(self, count: int) -> bytes:
        data = bytearray(count)
        at = 0
        while at < count:
            got = self._client.recv_into(memoryview(data)[at:])
            if not got:
                raise EOFError
            at += got
        return bytes(data)

    def _negotiate(self) -> bool:
        size = os.fstat(self._disk).st_size
        # Fixed newstyle, without zeroes after it.
        self._client.sendall(_GREETING + struct.pack(">H", 3))
        self._get(4)
        while True:
            _, option, length = struct.unpack(">8sII", self._get(16))
            self._get(length)
            if option == _EXPORT_NAME:
                self._client.sendall(struct.pack(">QH", size, _FLAGS))
                return True
            if option in (_INFO, _GO):
                self._reply(option, _INFO_REPLY, struct.pack(">HQH", 0, size, _FLAGS))
            self._reply(
                option, _ACK if option in (_ABORT, _INFO, _GO) else _UNSUPPORTED
            )
            if option in (_ABORT, _GO):
                return bool(option == _GO)

    def _reply(self, option: int, kind: int, data: bytes = b"") -> None:
        head = struct.pack(">QIII", _REPLY_MAGIC, option, kind, len(data))
        self._client.sendall(head + data)

    def _answer(self) -> bool:
        _, _, kind, cookie, offset, length = _REQUEST.unpack(self._get(_REQUEST.size))
        data, error = b"", 0
        if kind == _DISCONNECT:
            return False
        if kind == _READ:
            data = os.pread(self._disk, length, offset)
        elif kind == _WRITE:
            written = self._get(length)
            os.pwrite(self._disk, written, offset)
            self._add(WRITE, offset, 0, written)
        elif kind == _FLUSH:
            self._add(SYNC, 0, 0)
        elif kind in (_TRIM, _WRITE_ZEROES):
            punch(self._disk, offset, length)
            self._add(PUNCH, offset, length)
        else:
            error = _EINVAL
        self._client.sendall(_ANSWER.pack(0x67446698, error, cookie) + data)
        return True

    def _add(self, kind: int, offset: int, length: int, data: bytes = b"") -> None:
        self.under_way = 0 if kind == SYNC else self.under_way + 1
        head = RECORD.pack(kind, 0, 1, offset, length, len(data))
        if os.writev(self._log, [head, data]) != len(head) + len(data):
            raise OSError("the log is cut off")


@contextmanager
def nbd_disk(disk: Path, log: Path, address: Path) -> Iterator[LoggedDisk]:
    """Serve the file ``disk`` at a socket, and append to ``log``, until the client has
    gone; it must have when the block ends."""
    with (
        socket.socket(socket.AF_UNIX) as listener,
        disk.open("r+b") as file,
        log.open("ab") as records,
    ):
        listener.bind(str(address))
        listener.listen(1)
        served = LoggedDisk(file.fileno(), records.fileno())

        failed: list[OSError] = []

        def serve() -> None:
            with listener.accept()[0] as client:
                try:
                    served.serve(client)
                except OSError as error:
                    failed.append(error)

        server = threading.Thread(target=serve)
        server.start()
        try:
            yield served
        finally:
            # If nobody came, it waits for somebody.
            with socket.socket(socket.AF_UNIX) as nobody:
                nobody.connect(str(address))
            server.join()
            address.unlink()
            # What becomes of a machine whose disk fails is no fault of its programs.
            for error in failed:
                raise error
