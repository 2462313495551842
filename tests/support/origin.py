"""A web server's content and behaviour, as tests of prefetches need them."""

from __future__ import annotations

import hashlib
import random
import re
import threading
import time
from typing import Any

from support.scripted_server import response

from btrfs_ublk.units import KIB

UNIT = 64 * KIB
UNITS = 64
SIZE = UNITS * UNIT
DATA = random.Random(4).randbytes(SIZE)


class Origin:
    """DATA by ranges, after ``delay_s``; ``bad`` units are not to be had, and those
    below ``held_units`` come only once ``go_on`` is set.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.held_units = 0
        self.go_on = threading.Event()
        self.bad: set[int] = set()
        self.asked: list[int] = []  # units
        self.requests = 0

    def __call__(self, request: str) -> bytes:
        found = re.search(r"Range: bytes=(\d+)-(\d+)", request, re.IGNORECASE)
        assert found, request
        first, last = int(found[1]), int(found[2])
        units = range(first // UNIT, last // UNIT + 1)
        self.asked.extend(units)
        self.requests += 1
        if first // UNIT < self.held_units:
            self.go_on.wait()
        time.sleep(self.delay_s)
        if self.bad.intersection(units):
            return response("404 Not Found")
        head = (
            '206 Partial Content\nETag: "one"\n'
            f"Content-Range: bytes {first}-{last}/{SIZE}"
        )
        return response(head, DATA[first : last + 1])


def source_of(url: str) -> dict[str, Any]:
    units = [DATA[at : at + UNIT] for at in range(0, SIZE, UNIT)]
    digests = [hashlib.sha256(unit).hexdigest() for unit in units]
    return {
        "kind": "http",
        "url": url,
        "size": SIZE,
        "unit": UNIT,
        "digests": digests,
    }
