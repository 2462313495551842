"""The server of gRPC, asked by grpcio and by what does not speak HTTP/2."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from btrfs_ublk.containers.hpack import Decoder, InvalidHeadersError, codes, encode
from btrfs_ublk.containers.rpc import Asked, CallError, Code, Method, Server
from btrfs_ublk.units import MIB

grpc = pytest.importorskip("grpc")
_TIMEOUT_S = 60
_BIG = bytes(range(256)) * 1000


def fail(data: bytes, _: Asked) -> list[bytes]:
    raise CallError(Code.NOT_FOUND, f"no {data.decode()}: 100 %\nä")


def break_down(data: bytes, _: Asked) -> list[bytes]:
    raise RuntimeError("a defect")


class Waiting:
    """A call that waits until nobody wants its answer."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def __call__(self, data: bytes, asked: Asked) -> list[bytes]:
        self.begun.set()
        while asked.is_wanted:
            threading.Event().wait(0.01)
        self.ended.set()
        return []


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


@pytest.fixture
def address(tmp_path: Path, waiting: Waiting) -> Iterator[Path]:
    listener = socket.socket(socket.AF_UNIX)
    path = tmp_path / "socket"
    listener.bind(str(path))
    listener.listen()
    methods = {
        "/s/Echo": Method(lambda data, _: [data], waits=False),
        "/s/EchoLater": Method(lambda data, _: [data]),
        "/s/Many": Method(lambda data, _: [_BIG] * int(data), waits=False),
        "/s/Metadata": Method(lambda _, asked: [dict(asked.metadata)["key"].encode()]),
        "/s/Fail": Method(fail),
        "/s/Break": Method(break_down, waits=False),
        "/s/Wait": Method(waiting),
    }
    server = Server(listener, methods, workers=8)
    yield path
    server.stop(_TIMEOUT_S)


@pytest.fixture
def channel(address: Path) -> Iterator[Any]:
    with grpc.insecure_channel(f"unix:{address}") as opened:
        yield opened


def test_answers(channel: Any) -> None:
    for name in ("Echo", "EchoLater"):
        call = channel.unary_unary(f"/s/{name}")
        for data in (b"", b"x", _BIG, bytes(4 * MIB - 100)):
            assert call(data, timeout=_TIMEOUT_S) == data
    call = channel.unary_unary("/s/Metadata")
    for value in ("one", "one", "two" * 1000):
        sent = (("key", value),)
        assert call(b"", metadata=sent, timeout=_TIMEOUT_S) == value.encode()
    # More than the other end takes before it has read some.
    many = channel.unary_stream("/s/Many")
    assert list(many(b"40", timeout=_TIMEOUT_S)) == [_BIG] * 40
    assert list(many(b"0", timeout=_TIMEOUT_S)) == []


def test_many_at_once(channel: Any) -> None:
    call = channel.unary_unary("/s/EchoLater")
    asked = [call.future(str(x).encode(), timeout=_TIMEOUT_S) for x in range(500)]
    assert [int(each.result()) for each in asked] == list(range(500))


def test_errors(channel: Any) -> None:
    for name, data, code, said in (
        ("Fail", b"such", grpc.StatusCode.NOT_FOUND, "no such: 100 %\nä"),
        ("Break", b"", grpc.StatusCode.UNKNOWN, "the server has a defect"),
        ("Other", b"", grpc.StatusCode.UNIMPLEMENTED, "there is no /s/Other"),
        ("Echo", bytes(5 * MIB), grpc.StatusCode.RESOURCE_EXHAUSTED, "too large"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/s/{name}")(data, timeout=_TIMEOUT_S)
        assert caught.value.code() == code and said in caught.value.details()
    assert channel.unary_unary("/s/Echo")(b"x", timeout=_TIMEOUT_S) == b"x"


def test_a_call_knows_that_nobody_waits(channel: Any, waiting: Waiting) -> None:
    asked = channel.unary_unary("/s/Wait").future(b"", timeout=_TIMEOUT_S)
    assert waiting.begun.wait(_TIMEOUT_S)
    asked.cancel()
    assert waiting.ended.wait(_TIMEOUT_S)


def test_what_speaks_no_http_hurts_nobody(address: Path, channel: Any) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for data in (
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        preface + b"\xff" * 100,
        preface + b"\0\0\1\1\4\0\0\0\1\xff",  # a header that there is not
        preface + b"\0\0\0\x09\4\0\0\0\1",  # headers that go on
        preface[:9],
    ):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_TIMEOUT_S)
            asking.connect(str(address))
            asking.sendall(data)
            asking.shutdown(socket.SHUT_WR)
            while asking.recv(1 << 16):
                pass
    assert channel.unary_unary("/s/Echo")(b"x", timeout=_TIMEOUT_S) == b"x"


def test_headers() -> None:
    """The examples of RFC 7541, appendix C.4, and what is not valid."""
    assert sum(2.0**-bits for bits, _ in codes()) == 1.0 and len(codes()) == 257
    decoder = Decoder()
    first = [(":method", "GET"), (":scheme", "http"), (":path", "/")]
    first += [(":authority", "www.example.com")]
    assert decoder.decode(bytes.fromhex("828684418cf1e3c2e5f23a6ba0ab90f4ff")) == first
    second = bytes.fromhex("828684be5886a8eb10649cbf")
    assert decoder.decode(second) == [*first, ("cache-control", "no-cache")]
    third = "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf"
    assert decoder.decode(bytes.fromhex(third))[-1] == ("custom-key", "custom-value")
    for length in (1, 126, 127, 128, 10_000):
        assert Decoder().decode(encode([("x", "y" * length)])) == [("x", "y" * length)]
    for wrong in ("80", "ff", "be", "bf", "3fffffffffff", "4001", "00850000", "4081ff"):
        with pytest.raises(InvalidHeadersError):
            Decoder().decode(bytes.fromhex(wrong))
