"""What the kernel and the dynamic linker read of an ELF file before it runs (elf(5),
ld.so(8)). Only this is parsed; a malformed file counts as none."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass

MAGIC = b"\x7fELF"
_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3  # PT_*
_NEEDED, _STRINGS, _RPATH, _RUNPATH = 1, 5, 15, 29  # DT_*
_WRITABLE = 2  # PF_W
#: As many as any program has.
_MAX_HEADERS, _MAX_ENTRIES, _MAX_NAME_BYTES = 256, 4096, 4096


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of the file that is mapped; all in bytes."""

    offset: int
    length: int
    address: int
    writable: bool


@dataclass(frozen=True, kw_only=True)
class Elf:
    """A program or a library. ``kind`` is what those that load each other have in
    common: class, order of bytes, machine. ``entry`` is an offset in the file."""

    kind: tuple[int, int, int]
    interpreter: str | None
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]
    segments: tuple[Segment, ...]
    entry: int


def read_elf(data: bytes) -> Elf | None:
    """Return what a file says of how it is loaded; None if it is no ELF file."""
    with suppress(struct.error, ValueError, IndexError, OverflowError):
        return _read(data)
    return None


def _read(data: bytes) -> Elf:
    if data[:4] != MAGIC or data[4] not in (1, 2) or data[5] not in (1, 2):
        raise ValueError("no ELF file")
    wide, order = data[4] == 2, "<" if data[5] == 1 else ">"
    word = "Q" if wide else "I"
    machine = struct.unpack_from(f"{order}H", data, 18)[0]
    entry, headers_at = struct.unpack_from(f"{order}{word}{word}", data, 24)
    size, count = struct.unpack_from(f"{order}HH", data, 54 if wide else 42)
    segments: list[Segment] = []
    interpreter, dynamic = None, b""
    for number in range(min(count, _MAX_HEADERS)):
        at = headers_at + number * size
        if wide:
            kind, flags, offset, address, _, length = struct.unpack_from(
                f"{order}IIQQQQ", data, at
            )
        else:
            kind, offset, address, _, length, _, flags = struct.unpack_from(
                f"{order}7I", data, at
            )
        if kind == _LOAD:
            writable = bool(flags & _WRITABLE)
            segments.append(
                Segment(
                    offset=offset, length=length, address=address, writable=writable
                )
            )
        elif kind == _INTERPRETER:
            interpreter = _text(data, offset)
        elif kind == _DYNAMIC:
            dynamic = data[offset : offset + length]
    needed, paths = _dynamic(data, dynamic, f"{order}{word}{word}", segments)
    return Elf(
        kind=(data[4], data[5], machine),
        interpreter=interpreter,
        needed=needed,
        rpath=paths[_RPATH],
        runpath=paths[_RUNPATH],
        segments=tuple(segments),
        entry=_offset_of(entry, segments) or 0,
    )


def _dynamic(
    data: bytes, section: bytes, layout: str, segments: list[Segment]
) -> tuple[tuple[str, ...], dict[int, tuple[str, ...]]]:
    """Return the libraries that are needed, and where to search for them."""
    each = struct.calcsize(layout)
    whole = section[: min(len(section) // each, _MAX_ENTRIES) * each]
    entries: list[tuple[int, int]] = list(struct.iter_unpack(layout, whole))
    paths: dict[int, tuple[str, ...]] = {_RPATH: (), _RUNPATH: ()}
    strings = dict(reversed(entries)).get(_STRINGS)
    base = None if strings is None else _offset_of(strings, segments)
    if base is None:
        return (), paths
    for key in paths:
        found = [_text(data, base + value) for tag, value in entries if tag == key]
        paths[key] = tuple(x for text in found for x in text.split(":") if x)
    needed = [_text(data, base + value) for tag, value in entries if tag == _NEEDED]
    return tuple(needed), paths


def _offset_of(address: int, segments: list[Segment]) -> int | None:
    for one in segments:
        if one.address <= address < one.address + one.length:
            return address - one.address + one.offset
    return None


def _text(data: bytes, at: int) -> str:
    end = data.index(b"\0", at, at + _MAX_NAME_BYTES)
    return data[at:end].decode()
