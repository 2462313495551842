"""Compressed headers of HTTP/2 (RFC 7541), read; what is written has no compression."""

from __future__ import annotations

from collections import deque
from functools import cache, lru_cache
from itertools import islice

Header = tuple[str, str]

#: Appendix A. Entries with values are "name=value".
_STATIC = (
    ":authority :method=GET :method=POST :path=/ :path=/index.html :scheme=http "
    ":scheme=https :status=200 :status=204 :status=206 :status=304 :status=400 "
    ":status=404 :status=500 accept-charset accept-encoding=gzip,~deflate "
    "accept-language accept-ranges accept access-control-allow-origin age allow "
    "authorization cache-control content-disposition content-encoding "
    "content-language content-length content-location content-range content-type "
    "cookie date etag expect expires from host if-match if-modified-since "
    "if-none-match if-range if-unmodified-since last-modified link location "
    "max-forwards proxy-authenticate proxy-authorization range referer refresh "
    "retry-after server set-cookie strict-transport-security transfer-encoding "
    "user-agent vary via www-authenticate"
).split()
#: Appendix B: how many bits the code of each byte has, and that of the end; codes of
#: one length ascend with their bytes. "28*7" are seven of 28.
_LENGTHS = (
    "13 23 28*7 24 30 28*2 30 28*8 30 28*9 6 10*2 12 13 6 8 11 10*2 8 11 8 6*3 5*3 "
    "6*7 7 8 15 6 12 10 13 6 7*22 8 7 8 13 19 13 14 6 15 5 6 5 6 5 6*3 5 7*2 6*3 5 "
    "6 7 6 5*2 6 7*5 15 11 14 13 28 20 22 20*2 22*3 23 22 23*5 24 23 24*2 22 23 24 "
    "23*4 21 22 23 22 23*2 24 22 21 20 22*2 23*2 21 23 22*2 24 21 22 23*2 21*2 22 "
    "21 23 22 23*2 20 22*3 23 22*2 23 26*2 20 19 22 23 22 25 26*3 27*2 26 24 25 19 "
    "21 26 27*2 26 27 24 21*2 26*2 28 27*3 20 24 20 21 22 21*2 23 22*2 25*2 24*2 26 "
    "23 26 27 26*2 27*5 28 27*5 26 30"
)
_ENTRY_BYTES = 32  # what an entry of the table counts besides its text
_END = 256


class InvalidHeadersError(ValueError):
    """A block of headers that is not valid."""


@cache
def _static() -> list[Header]:
    pairs = (each.replace("~", " ").partition("=") for each in _STATIC)
    return [(name, value) for name, _, value in pairs]


@cache
def codes() -> dict[tuple[int, int], int]:
    """Return which byte a code of some bits is: by how many, and by their value."""
    lengths: list[int] = []
    for word in _LENGTHS.split():
        bits, _, times = word.partition("*")
        lengths += [int(bits)] * int(times or 1)
    found, code, before = {}, 0, 0
    for length, byte in sorted((length, byte) for byte, length in enumerate(lengths)):
        code <<= length - before
        found[length, code] = byte
        code, before = code + 1, length
    return found


@lru_cache(maxsize=1024)
def unpack_text(data: bytes) -> bytes:
    """Return what a text was before it was packed. Raises InvalidHeadersError."""
    known, made = codes(), bytearray()
    code = bits = 0
    for byte in data:
        for shift in range(7, -1, -1):
            code, bits = code << 1 | byte >> shift & 1, bits + 1
            found = known.get((bits, code))
            if found is not None:
                if found == _END:
                    raise InvalidHeadersError("a text has the code of its end")
                made.append(found)
                code = bits = 0
    if bits > 7 or code != (1 << bits) - 1:
        raise InvalidHeadersError("a text ends within a code")
    return bytes(made)


class Decoder:
    """Reads the headers of one connection, with the table that its blocks change."""

    def __init__(self, table_bytes: int = 4096) -> None:
        self._most_bytes = self._limit_bytes = table_bytes
        self._table: deque[Header] = deque()
        self._bytes = 0

    def decode(self, block: bytes) -> list[Header]:
        """Return the headers of a block. Raises InvalidHeadersError."""
        try:
            return self._decode(block)
        except IndexError as error:
            raise InvalidHeadersError("a block of headers is cut off") from error

    def _decode(self, block: bytes) -> list[Header]:
        found, at = [], 0
        while at < len(block):
            first = block[at]
            if first & 0x80:
                number, at = _number(block, at, 7)
                found.append(self._entry(number))
            elif first & 0xE0 == 0x20:
                self._most_bytes, at = _number(block, at, 5)
                if self._most_bytes > self._limit_bytes:
                    raise InvalidHeadersError("the table is to be too large")
                self._evict()
            else:
                kept = first & 0x40
                number, at = _number(block, at, 6 if kept else 4)
                if number:
                    name = self._entry(number)[0]
                else:
                    name, at = _text(block, at)
                value, at = _text(block, at)
                found.append((name, value))
                if kept:
                    self._table.appendleft((name, value))
                    self._bytes += _size((name, value))
                    self._evict()
        return found

    def _entry(self, number: int) -> Header:
        fixed = _static()
        if 0 < number <= len(fixed):
            return fixed[number - 1]
        for entry in islice(self._table, max(0, number - len(fixed) - 1), None):
            if number:
                return entry
        raise InvalidHeadersError(f"there is no header {number}")

    def _evict(self) -> None:
        while self._bytes > self._most_bytes:
            self._bytes -= _size(self._table.pop())


def _size(header: Header) -> int:
    return sum(map(len, header)) + _ENTRY_BYTES


def _number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """Read a number that begins in the last bits of a byte; return what follows it."""
    most = (1 << bits) - 1
    number = block[at] & most
    at += 1
    if number < most:
        return number, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        number += (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return number, at
        if shift > 28:
            raise InvalidHeadersError("a number is too large")


def _text(block: bytes, at: int) -> tuple[str, int]:
    packed = block[at] & 0x80
    length, at = _number(block, at, 7)
    data = block[at : at + length]
    if len(data) < length:
        raise InvalidHeadersError("a text is cut off")
    return (unpack_text(data) if packed else data).decode("latin-1"), at + length


def encode(headers: list[Header]) -> bytes:
    """Return a block that changes no table."""
    made = bytearray()
    for header in headers:
        made.append(0)
        for text in header:
            data = text.encode("latin-1")
            made += _prefixed(len(data)) + data
    return bytes(made)


def _prefixed(number: int) -> bytes:
    if number < 0x7F:
        return bytes([number])
    made, rest = bytearray([0x7F]), number - 0x7F
    while rest > 0x7F:
        made.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*made, rest])
