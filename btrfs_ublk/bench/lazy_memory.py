"""What a server of much lazy data takes of memory, which is locked: 100,000 mappings,
and a source of 1 TiB with digests and a cache.

``python -m btrfs_ublk.bench.lazy_memory --help``
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path

import click

from btrfs_ublk.bench import options
from btrfs_ublk.bench.fio import Fio, parse_output, random_read_argv
from btrfs_ublk.bench.origin import NGINX, origin
from btrfs_ublk.bench.report import (
    Document,
    Result,
    Table,
    finish,
    make_document,
    number,
)
from btrfs_ublk.cache import Cache
from btrfs_ublk.capabilities import FUSE, LOOP, ROOT, require
from btrfs_ublk.entry import json_option, run_command
from btrfs_ublk.lazy import Addition, Digests
from btrfs_ublk.lazy.digests import DEFAULT_UNIT_BYTES
from btrfs_ublk.process import run
from btrfs_ublk.resources.tempdir import tempdir
from btrfs_ublk.server import BlockServer, Description, LazySegment
from btrfs_ublk.units import KIB, MIB, TIB

_ENGINE = "io_uring"
_DEPTH = 64
_TIMEOUT_S = 300.0
#: The cache's cap: it is on tmpfs, and what is measured does not depend on it.
_CACHE_BYTES = 256 * MIB
_SMALL = {"kind": "memset", "byte": 1, "size": 4 * KIB}


def memory_bytes(pid: int) -> dict[str, int]:
    """What is resident now, and was at most."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {"resident": "VmRSS", "most": "VmHWM"}
    return {key: int(fields[name].split()[0]) * KIB for key, name in names.items()}


def _zero_digests(size_bytes: int) -> Digests:
    """Of a file that is one hole."""
    one = hashlib.sha256(bytes(DEFAULT_UNIT_BYTES)).digest()
    units = size_bytes // DEFAULT_UNIT_BYTES
    return Digests(size_bytes, DEFAULT_UNIT_BYTES, one * units)


def measure(
    parent: Path, *, mappings: int, size_bytes: int, runtime_s: float
) -> list[Result]:
    """One result for each stage, on a directory in memory."""
    found: list[Result] = []
    with ExitStack() as stack:
        root = stack.enter_context(tempdir(parent=parent))
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
            found.append({"stage": stage} | memory_bytes(server.pid) | more)

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
        argv = random_read_argv(
            server.device,
            size_bytes=size_bytes,
            engine=_ENGINE,
            depth=_DEPTH,
            direct=True,
            jobs=1,
            ramp_s=0,
            runtime_s=runtime_s,
            output=root / "fio.json",
        )
        run([*argv, f"--offset={size_bytes}"], timeout_s=_TIMEOUT_S)
        outcome = parse_output((root / "fio.json").read_text(encoding="utf-8"))
        note("read at random", iops=outcome.total_iops)
    return found


def tables(document: Document) -> list[Table]:
    """One row per stage."""
    rows = [
        (
            result["stage"],
            number(result["resident"] / MIB, 1),
            number(result["most"] / MIB, 1),
            number(result.get("iops", float("nan"))),
        )
        for result in document["results"]
    ]
    parameters = document["parameters"]
    note = (
        f"MiB. {parameters['mappings']:,} mappings; a source of "
        f"{parameters['size_bytes'] / TIB:g} TiB with digests over HTTP, its cache; "
        f"{_DEPTH} readers of 4 KiB anywhere in it."
    )
    columns = ("after", "resident", "at most", "reads/s")
    return [Table("Memory of a server of lazy data", columns, rows, 1, note)]


@click.command(context_settings=options.SETTINGS)
@click.option("--mappings", type=options.COUNT, default=100_000)
@options.size_option("1T")
@click.option("--runtime", "runtime_s", type=click.FloatRange(min=0.1), default=5.0)
@options.memory_directory_option
@json_option
def command(
    mappings: int, size_bytes: int, runtime_s: float, parent: Path, as_json: bool
) -> None:
    """Memory of a server: when it starts, with mappings, and under cold reads."""
    require(ROOT, LOOP, FUSE, NGINX, Fio(_ENGINE))
    parameters = {
        "mappings": mappings,
        "size_bytes": size_bytes,
        "runtime_s": runtime_s,
    }
    results = measure(
        parent, mappings=mappings, size_bytes=size_bytes, runtime_s=runtime_s
    )
    document = make_document(
        "lazy_memory", parameters=parameters, directory=parent, results=results
    )
    finish(document, as_json=as_json)


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.lazy_memory")
