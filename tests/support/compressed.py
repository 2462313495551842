"""Compressed objects of many kinds, and selections of the bytes that they decode to."""

import gzip
import random
import struct
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

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


HEADER = struct.Struct("<8sIIQQQ")
SELECTED_UNIT = struct.Struct("<QII")
PIECE = struct.Struct("<III")
BLOCK = 4096


@dataclass(frozen=True)
class Selection:
    """``data`` is what is read of a source with the selection ``file``."""

    file: bytes
    data: bytes


def select(decoded: bytes, unit_bytes: int, *, seed: int = 1) -> Selection:
    """Choose pieces of what is decoded, at random; each begins in a block of its own,
    and some go on in the next unit."""
    draw = random.Random(seed)
    units: list[list[tuple[int, int, int]]] = [[]]
    data = bytearray()
    at = place = 0
    while True:
        at += draw.choice([0, 1, 511, 512, 20_000])
        length = draw.choice([1, 700, BLOCK, 9_999, 70_000])
        if at + length > len(decoded):
            break
        while length:
            part = min(length, unit_bytes - place)
            units[-1].append((place, at, part))
            at, length, place = at + part, length - part, place + part
            place += -place % BLOCK
            if place == unit_bytes:
                units.append([])
                place = 0
    units = [pieces for pieces in units if pieces]
    heads, lists = [], []
    for pieces in units:
        unit = bytearray(unit_bytes)
        first = end = pieces[0][1]
        for where, offset, part in pieces:
            unit[where : where + part] = decoded[offset : offset + part]
            lists.append(PIECE.pack(where, offset - end, part))
            end = offset + part
        heads.append(SELECTED_UNIT.pack(first, end - first, len(pieces)))
        data += unit
    header = HEADER.pack(
        *(b"BUselec\0", 1, unit_bytes, len(units), len(decoded), len(lists))
    )
    return Selection(b"".join([header, *heads, *lists]), bytes(data))
