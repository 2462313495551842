"""Compressed objects of many kinds, and content that is worth compressing."""

from __future__ import annotations

import gzip
import random
import struct
import subprocess
import zlib
from collections.abc import Iterator

SKIPPABLE = struct.pack("<II", 0x184D2A50, 5) + b"later"


def content(size: int, seed: int = 1) -> bytes:
    """Words, zeroes, and bytes that cannot be compressed, by turns."""
    draw = random.Random(seed)
    words = [draw.randbytes(draw.randrange(2, 9)).hex().encode() for _ in range(300)]
    made = bytearray()
    while len(made) < size:
        kind = draw.randrange(6)
        if kind == 0:
            made += draw.randbytes(draw.randrange(40_000))
        elif kind == 1:
            made += bytes(draw.randrange(100_000))
        else:
            made += b" ".join(draw.choices(words, k=draw.randrange(5000)))
    return bytes(made[:size])


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def members(data: bytes, size: int = 65280) -> bytes:
    """gzip of many members, as bgzip and some builders of layers make it."""
    return b"".join(gzip.compress(piece, 6, mtime=0) for piece in pieces(data, size))


def stored(data: bytes) -> bytes:
    return gzip.compress(data, 0, mtime=0)


def flushed(data: bytes, level: int = 6) -> bytes:
    """One member, whose blocks begin at whole bytes now and then."""
    stream = zlib.compressobj(level, wbits=31)
    made = b""
    for piece in pieces(data, 50_000):
        made += stream.compress(piece) + stream.flush(zlib.Z_FULL_FLUSH)
    return made + stream.flush()


def zstd(data: bytes, *options: str) -> bytes:
    """One frame. From a pipe, so it does not say how much comes out of it."""
    return subprocess.run(
        ["zstd", "-q", "-c", *options], input=data, stdout=subprocess.PIPE, check=True
    ).stdout


def frames(data: bytes, size: int, *options: str) -> list[bytes]:
    return [zstd(piece, *options) for piece in pieces(data, size)]


def seekable(data: bytes, size: int, *, sums: bool = False) -> bytes:
    """The seekable format: frames, and a table of their sizes."""
    made = frames(data, size)
    entries = b""
    for frame, piece in zip(made, pieces(data, size), strict=True):
        entries += struct.pack("<II", len(frame), len(piece)) + bytes(4 if sums else 0)
    footer = struct.pack("<IBI", len(made), 0x80 if sums else 0, 0x8F92EAB1)
    head = struct.pack("<II", 0x184D2A5E, len(entries) + len(footer))
    return b"".join(made) + head + entries + footer
