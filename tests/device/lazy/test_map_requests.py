"""Maps of running servers: requests over the control connection, from Python."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.devices import MAP_BYTES, MAP_PATTERN, MAP_UNIT, MEMSET, map_description
from support.needs import Need
from support.shells import root_of, units_of

from btrfs_ublk.base.capabilities import FUSE, ROOT
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.content import Added, Addition, Mapping, Room, digest_file
from btrfs_ublk.content.refused import Refused
from btrfs_ublk.errors import UsageError
from btrfs_ublk.server import BlockServer
from btrfs_ublk.units import GIB, KIB, MIB, TIB

Run = Callable[..., BlockServer]


@pytest.fixture
def run(need: Need, tmp_path: Path) -> Iterator[Run]:
    """Starts a server; with what the last one has left, if there was one."""
    need(ROOT, FUSE)
    with ExitStack() as stack:

        def enter(**options: Any) -> BlockServer:
            server = BlockServer(
                map_description(tmp_path, **options), front_end="fuse", queues=1
            )
            return stack.enter_context(server)

        yield enter


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(5 * MIB + 1234))
    return path


def test_what_is_added_can_be_read_at_once(run: Run, data: Path) -> None:
    server = run()
    with pytest.raises(OSError):
        read_direct(server.device, 0, 4096)
    length = -(-data.stat().st_size // 4096) * 4096
    source = {"kind": "file", "path": str(data), "unit": MAP_UNIT}
    added = server.map_add([source], [Addition(length=length)])
    size_bytes = data.stat().st_size
    assert added == [Added(0, False, length, size_bytes)]
    expected = data.read_bytes().ljust(length, b"\0")
    assert read_direct(server.device, 0, length) == expected
    # Once more changes nothing, and finds the same place.
    assert server.map_add([source], [Addition(length=length)]) == [
        Added(0, True, length, size_bytes)
    ]
    server.stop()
    server = run()
    assert list(server.map().list()) == [
        Mapping(offset=0, length=length, source=1, source_offset=0, digests="pinned")
    ]
    assert read_direct(server.device, 0, length) == expected


def test_batches_of_any_size(run: Run) -> None:
    server = run(cached=False)
    for count, base in ((10, 0), (5000, 256 * MIB)):
        additions = [
            Addition(
                offset=base + 8192 * number,
                length=4096,
                source=number % 2,
                source_offset=0,
            )
            for number in range(count)
        ]
        expected = [
            Added(base + 8192 * number, False, 4096, 4096) for number in range(count)
        ]
        assert server.map_add([MEMSET, MAP_PATTERN], additions) == expected
        again = server.map_add([MEMSET, MAP_PATTERN], additions)
        assert all(added.existed for added in again)
    listed = list(server.map().list())
    assert len(listed) == 5010 and len({mapping.offset for mapping in listed}) == 5010
    assert [x.offset for x in server.map().list(start=8192, end=16385)] == [8192, 16384]
    # One that does not fit undoes all; long requests and short ones say why alike.
    for count in (1, 2000):
        additions = [
            Addition(offset=512 * MIB + 8192 * x, length=4096) for x in range(count)
        ]
        with pytest.raises(Refused, match="4096 bytes at 8192, to source 2") as caught:
            server.map_add([MEMSET], [*additions, Addition(offset=8192, length=8192)])
        assert caught.value.errno == "EEXIST"
    assert server.map().stats()["mappings"] == 5010


def test_room(run: Run) -> None:
    server = run(cached=False)
    room = Room(start=MIB, end=2 * MIB, alignment=128 * KIB)
    additions = [
        Addition(length=4096, source_offset=4096 * number) for number in range(8)
    ]
    added = server.map_add([MEMSET], additions, room=room)
    assert [one.offset for one in added] == [MIB + 128 * KIB * x for x in range(8)]
    with pytest.raises(Refused, match="are free from 1048576 to 2097152") as caught:
        server.map_add([MAP_PATTERN], [Addition(length=4096)], room=room)
    assert caught.value.errno == "ENOSPC"
    # By default: what the device shows.
    with pytest.raises(Refused, match=f"from 0 to {MAP_BYTES}"):
        server.map_add([MAP_PATTERN | {"size": 2 * GIB}], [Addition(length=2 * GIB)])
    # And never anything else: nobody could read it.
    with pytest.raises(Refused, match=f"are free from {2 * MAP_BYTES} to {MAP_BYTES}"):
        server.map_add(
            [MAP_PATTERN],
            [Addition(length=4096)],
            room=Room(start=2 * MAP_BYTES, end=3 * MAP_BYTES),
        )


def test_nothing_is_mapped_where_no_device_shows_it(run: Run) -> None:
    """It could not be read, and what is mapped stays so."""
    server = run(cached=False)
    message = f"could never be read: the device shows offsets 0 to {MAP_BYTES}"
    for offset in (MAP_BYTES - 4096, MAP_BYTES, 70 * TIB):
        # In the line, and in a file.
        for count in (1, 2000):
            good = [Addition(offset=8192 * x, length=4096) for x in range(count - 1)]
            with pytest.raises(UsageError, match=f"8192 bytes at {offset} {message}"):
                server.map_add([MEMSET], [*good, Addition(offset=offset, length=8192)])
    assert server.map().stats()["mappings"] == 0
    assert server.map_add([MEMSET], [Addition(offset=MAP_BYTES - 4096, length=4096)])


def test_digests_from_a_file(run: Run, data: Path, tmp_path: Path) -> None:
    server = run()
    digests = digest_file(data, unit_bytes=MAP_UNIT)
    assert digests.units == b"".join(units_of(data.read_bytes(), MAP_UNIT))
    size = data.stat().st_size
    assert digests.root == root_of(
        units_of(data.read_bytes(), MAP_UNIT), size_bytes=size, unit_bytes=MAP_UNIT
    )
    digests.write(tmp_path / "digests")
    source = {
        "kind": "file",
        "path": str(data),
        "unit": MAP_UNIT,
        "digests": {"path": str(tmp_path / "digests")},
    }
    addition = Addition(offset=0, length=5 * MIB)
    with pytest.raises(UsageError, match='"root" is'):
        server.map_add([source | {"root": "ab" * 32}], [addition])
    server.map_add([source | {"root": digests.root}], [addition])
    shown = server.map().show(offset=4096)
    assert shown["mapping"]["digests"] == "given"
    assert shown["source"]["description"]["root"] == digests.root
    assert shown["source"]["units"] == len(digests.hex())
    # One byte that is not as it was is not delivered, and its neighbours are.
    with data.open("r+b") as file:
        before = data.stat()
        file.seek(3 * MAP_UNIT + 100)
        file.write(b"\0\0\0\0\0\0\0\0")
        file.flush()
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(OSError):
        read_direct(server.device, 3 * MAP_UNIT, 4096)
    assert (
        hashlib.sha256(read_direct(server.device, 0, MAP_UNIT)).digest()
        == digests.units[:32]
    )
    assert list(server.map().verify()) == []


def test_drain_and_show(run: Run, data: Path) -> None:
    server = run()
    size = data.stat().st_size
    source = {"kind": "file", "path": str(data), "unit": MAP_UNIT}
    length = -(-size // 4096) * 4096
    server.map_add(
        [source, MEMSET], [Addition(length=length), Addition(length=MIB, source=1)]
    )
    drained = server.map().drain()
    assert (drained.fetched_bytes, drained.cached_units) == (size, 0)
    assert drained.is_complete
    units = -(-size // MAP_UNIT)
    shown = server.map().show(source=1)["source"]
    assert (shown["units"], shown["pinned_units"], shown["cached_units"]) == (
        units,
    ) * 3
    again = server.map().drain(start=MAP_UNIT, end=3 * MAP_UNIT)
    assert (again.fetched_bytes, again.cached_units) == (0, 2)
    # With its source gone, all of it is still there, for this server and the next.
    expected = data.read_bytes().ljust(length, b"\0")
    data.unlink()
    assert read_direct(server.device, 0, length) == expected
    problems = list(server.map().verify(ask_mirrors=True))
    assert [problem.source for problem in problems] == [1]
    server.stop()
    assert read_direct(run().device, 0, length) == expected
