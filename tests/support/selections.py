"""Selections of bytes of a decoded object (csrc/lazy/selection.h), made by hand."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

HEADER = struct.Struct("<8sIIQQQ")
UNIT = struct.Struct("<QII")
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
        heads.append(UNIT.pack(first, end - first, len(pieces)))
        data += unit
    header = HEADER.pack(
        *(b"BUselec\0", 1, unit_bytes, len(units), len(decoded), len(lists))
    )
    return Selection(b"".join([header, *heads, *lists]), bytes(data))
