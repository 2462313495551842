"""Which node of a ring of caches has stored wrong bytes (docs/design/hosts.md)."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping

import requests

from btrfs_ublk.base.hosts import SLICE_HEADER
from btrfs_ublk.image.documents import Descriptor

#: What a front says: the node that has the first slice of its answer.
_NODE_HEADER = "X-Site-Cache-Node"
#: What it is told: the node that it is to do without.
WITHOUT_HEADER = "X-Site-Cache-Without"
_NODES = range(1, 1024 + 1)
_READ_BYTES = 1 << 20
_SLICE_BYTES = range(4 << 10, (16 << 20) + 1)
#: Of what is searched for the node that has it wrong, slice by slice.
_MOST_BYTES, _MOST_SLICES, _LONGEST_S = 64 << 20, 1024, 60.0

#: Gets bytes from one to before another, without a node (0: with all), as well as the
#: answer's headers. Raises requests.RequestException.
Get = Callable[[int, int, int], tuple[bytes, Mapping[str, str]]]


def _number(text: str, among: range) -> int:
    number = int(text) if text.isdecimal() and len(text) < 10 else 0
    return number if number in among else 0


def slice_bytes_of(headers: Mapping[str, str]) -> int:
    """Return how large the slices of a front are; 0: it does not say."""
    return _number(headers.get(SLICE_HEADER, ""), _SLICE_BYTES)


def node_of(headers: Mapping[str, str], start: int, end: int) -> int:
    """Return the node that had all of an answer, these bytes of a blob; 0: that is not
    known."""
    size = slice_bytes_of(headers)
    if not size or start // size != (end - 1) // size:
        return 0
    return _number(headers.get(_NODE_HEADER, ""), _NODES)


def is_right(one: Descriptor, fd: int) -> bool:
    """Whether a file has the bytes of a blob."""
    found = hashlib.sha256()
    for start in range(0, one.size, _READ_BYTES):
        found.update(os.pread(fd, _READ_BYTES, start))
    return f"sha256:{found.hexdigest()}" == one.digest


def mend(get: Get, one: Descriptor, fd: int) -> int:
    """Replace what is wrong in a blob's file, where one node has stored it. As only the
    digest of the whole is known, what each node has is got without that node in turn,
    until all is right. Returns the number of that node, or 0 if all nodes are right
    now. Raises requests.RequestException."""
    until_s = time.monotonic() + _LONGEST_S
    size = slice_bytes_of(get(0, 1, 0)[1])
    if not size or one.size > min(_MOST_BYTES, _MOST_SLICES * size):
        raise requests.HTTPError("wrong bytes")

    def put(start: int, without: int) -> int:
        if time.monotonic() > until_s:
            raise requests.Timeout("wrong bytes")
        end = min(start + size, one.size)
        data, headers = get(start, end, without)
        os.pwrite(fd, data, start)
        return node_of(headers, start, end)

    slices: dict[int, list[int]] = {}
    for start in range(0, one.size, size):
        slices.setdefault(put(start, 0), []).append(start)
    if is_right(one, fd):
        return 0
    slices.pop(0, None)
    for node, starts in slices.items():
        before = [os.pread(fd, size, start) for start in starts]
        for start in starts:
            put(start, node)
        if is_right(one, fd):
            return node
        for start, data in zip(starts, before, strict=True):
            os.pwrite(fd, data, start)
    raise requests.HTTPError("wrong bytes")
