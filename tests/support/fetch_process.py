"""Data of sources that the fetch process asks for, and their server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.scripted_server import ScriptedServer, response, scripted_server

from btrfs_ublk.units import MIB

DATA = random.Random(11).randbytes(MIB)

UNIT = 64 << 10


def server_of(request: str) -> bytes:
    """Answer with the range that was asked for."""
    lines = dict(x.split(": ", 1) for x in request.splitlines()[1:] if ": " in x)
    first, last = map(int, lines["Range"].removeprefix("bytes=").split("-"))
    head = f"206 Partial Content\nContent-Range: bytes {first}-{last}/{len(DATA)}"
    return response(f'{head}\nETag: "one"', DATA[first : last + 1])


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server(server_of) as running:
        yield running


def source_of(server: ScriptedServer, **keys: Any) -> dict[str, Any]:
    mirror = {"kind": "http", "url": server.url()}
    return {"size": len(DATA), "unit": UNIT, "mirrors": [mirror]} | keys
