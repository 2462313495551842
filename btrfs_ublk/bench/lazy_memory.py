"""The memory, which is locked, of a server with much lazy data: 100,000 mappings, and a
source of 1 TiB with digests and a cache.

``python -m btrfs_ublk.bench.lazy_memory --help``
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path

import click

from btrfs_ublk.base.capabilities import FUSE, LOOP, ROOT, Fio
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.bench import options
from btrfs_ublk.bench.fio import random_reads
from btrfs_ublk.bench.origin import NGINX, origin
from btrfs_ublk.bench.report import Document, Table
from btrfs_ublk.bench.study import Column, Run, study, table
from btrfs_ublk.content import Addition, Digests
from btrfs_ublk.content.cache import Cache
from btrfs_ublk.content.digests import DEFAULT_UNIT_BYTES
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.server import BlockServer, Description, LazySegment
from btrfs_ublk.units import KIB, MIB, TIB

_DEPTH = 64
#: The limit of the cache, which is on tmpfs; the results do not depend on it.
_CACHE_BYTES = 256 * MIB
_SMALL = {"kind": "memset", "byte": 1, "size": 4 * KIB}


def memory_bytes(pid: int) -> dict[str, int]:
    """Return the resident memory now, and at most so far."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {"resident": "VmRSS", "most": "VmHWM"}
    return {key: int(fields[name].split()[0]) * KIB for key, name in names.items()}


def _zero_digests(size_bytes: int) -> Digests:
    """Return the digests of a file that is one hole."""
    one = hashlib.sha256(bytes(DEFAULT_UNIT_BYTES)).digest()
    units = size_bytes // DEFAULT_UNIT_BYTES
    return Digests(size_bytes, DEFAULT_UNIT_BYTES, one * units)


def tables(document: Document) -> list[Table]:
    """Make a table with one row per stage."""
    given = document["parameters"]
    return [
        table(
            "Memory of a server of lazy data",
            document["results"],
            {"after": lambda x: str(x["stage"])},
            [
                Column("resident", "resident", 1, 1 / MIB),
                Column("at most", "most", 1, 1 / MIB),
                Column("reads/s", "iops"),
            ],
            note=f"MiB. {given['mappings']:,} mappings; a source of "
            f"{given['size_bytes'] / TIB:g} TiB with digests over HTTP, its cache; "
            f"{_DEPTH} readers of 4 KiB anywhere in it.",
        )
    ]


@study(
    "lazy_memory",
    click.option("--mappings", type=options.COUNT, default=100_000),
    options.size_option("1T", "Of the object."),
    options.runtime_option(5.0),
    needs=(ROOT, LOOP, FUSE, NGINX, Fio("io_uring")),
    repeats=None,
    in_memory=True,
    recorded=("mappings", "size_bytes", "runtime_s"),
)
def command(run: Run, mappings: int, size_bytes: int, runtime_s: float) -> None:
    """Memory of a server: when it starts, with mappings, and under cold reads."""
    with ExitStack() as stack:
        root = stack.enter_context(tempdir(parent=run.parent))
        served = root / "served"
        served.mkdir()
        with (served / "object").open("wb") as file:
            file.truncate(size_bytes)
        host, port = stack.enter_context(origin(root, served))
        digests = _zero_digests(size_bytes)
        digests.write(root / "digests")
        cache = root / "cache"
        cache.mkdir(mode=0o700)
        Cache(cache).limit(max_bytes=_CACHE_BYTES, reserve_bytes=MIB)
        segment = LazySegment(
            offset=0, length=2 * size_bytes, map=str(root / "map"), cache=str(cache)
        )
        description = Description(2 * size_bytes, [segment])
        server = stack.enter_context(BlockServer(description, front_end="fuse"))

        def note(stage: str, **more: float) -> None:
            run.add({"stage": stage} | memory_bytes(server.pid) | more)

        note("started")
        at = [
            Addition(offset=8 * KIB * each, length=4 * KIB) for each in range(mappings)
        ]
        server.map_add([_SMALL], at)
        note("mappings added")
        source = {
            "kind": "http",
            "url": f"http://{host}:{port}/object",
            "proxy": "none",
            "size": size_bytes,
            "unit": DEFAULT_UNIT_BYTES,
            "digests": {"path": str(root / "digests")},
            "root": digests.root,
        }
        server.map_add([source], [Addition(offset=size_bytes, length=size_bytes)])
        note("source added")
        outcome = random_reads(
            server.device,
            size_bytes=size_bytes,
            depth=_DEPTH,
            runtime_s=runtime_s,
            output=root / "fio.json",
            more=[f"--offset={size_bytes}"],
        )
        note("read at random", iops=outcome.total_iops)


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.lazy_memory")
