"""One benchmark run: 4 KiB random reads of a clone of virtual data.

It makes a new seed, server and sprout. The clone's bytes are checked before and after
fio reads, and CPU use is recorded meanwhile.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, Fio, Helper, require
from btrfs_ublk.base.helpers import MAP_PHYSICAL, MKSEED, SERVER
from btrfs_ublk.base.process import run
from btrfs_ublk.base.readers import Reader, read_buffered, read_direct
from btrfs_ublk.bench import content
from btrfs_ublk.bench.config import Configuration
from btrfs_ublk.bench.cpu import Usage
from btrfs_ublk.bench.environment import environment_id, versions
from btrfs_ublk.bench.fio import Outcome, Workload, run_fio
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.server import BlockServer
from btrfs_ublk.units import BLOCK_BYTES, MIB, format_size
from btrfs_ublk.volume.temporary import Volume, volume

Row = dict[str, Any]

#: Values of a row's "status". Only rows that are OK count.
OK = "ok"
VOID = "void"  # the data were wrong, or something was written: see "reason"
FAILED = "failed"
SKIPPED = "skipped"  # this machine cannot do it

_MAX_WRITTEN_BYTES = 10 * MIB
#: Room for the seed's metadata and the sprout's writes.
_ROOM_BYTES = 64 * MIB
_NAME = "clone"
_SYNC_TIMEOUT_S = 60.0


_PARTS = ("total", "fio", "server", "rest")


class VoidError(BtrfsUblkError):
    """The measurement is void."""


def run_configuration(
    configuration: Configuration, *, parent: Path, environment: Mapping[str, Any]
) -> Row:
    """Measure. Always returns a row, whose "status" and "reason" say what happened.

    Images go to a temporary directory below ``parent``. ``environment`` is that of
    environment(). Only exceptions that are neither ours nor the system's are raised,
    mainly KeyboardInterrupt; nothing is left behind then.
    """
    row: Row = configuration.to_dict() | {
        "total_iops": None,
        "job_iops": None,
        "status": OK,
    }
    start_s = time.monotonic()
    try:
        row |= measure(configuration, parent=parent)
    except VoidError as error:
        row |= {"status": VOID, "reason": str(error)}
    except CapabilityError as error:
        row |= {"status": SKIPPED, "reason": str(error)}
    except (BtrfsUblkError, OSError, EOFError) as error:
        row |= {"status": FAILED, "reason": str(error)}
    return row | {
        "seconds": round(time.monotonic() - start_s, 3),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": environment_id(environment),
        "versions": versions(environment),
    }


def measure(configuration: Configuration, *, parent: Path) -> Row:
    """Measure what a run adds to the keys of its configuration.

    Raises VoidError, CapabilityError and BtrfsUblkError.
    """
    require(ROOT, BTRFS, LOOP, Helper(MKSEED), Helper(SERVER), Helper(MAP_PHYSICAL))
    require(Fio(configuration.engine))
    content.require_room(parent, _ROOM_BYTES, "a run takes up to")
    pieces = content.clone_pieces(
        virtual_data_bytes=configuration.virtual_data_bytes,
        clone_bytes=configuration.total_clone_bytes,
    )
    with tempdir(parent=parent) as directory:
        contents = content.make_contents(
            configuration.source,
            virtual_data_bytes=configuration.virtual_data_bytes,
            pieces=pieces,
        )
        target = directory / "mnt"
        target.mkdir()
        with volume(
            target,
            [contents.served],
            virtual_data_size=configuration.virtual_data_bytes,
            strategy=configuration.seed,
            parent=directory,
            front_end=configuration.front_end,
            queues=configuration.num_queues,
        ) as made:
            path = target / _NAME
            with made.virtual_file() as virtual:
                content.make_clone(virtual, path, pieces)
            # Dirty data would otherwise be written while fio reads.
            run(["sync", "--file-system", target], timeout_s=_SYNC_TIMEOUT_S)
            return _measure_volume(configuration, made, path, contents, directory)


def _measure_volume(
    configuration: Configuration,
    made: Volume,
    path: Path,
    contents: content.Contents,
    directory: Path,
) -> Row:
    direct = configuration.direct and configuration.engine != "mmap"
    reader = read_direct if direct else read_buffered
    checked = _check(path, contents, reader, "before")
    outcome, usage = _run_fio(configuration, made.server, path, directory)
    checked += _check(path, contents, reader, "after")
    # NB: st_blocks counts 512-byte units (stat(2)). The file was empty at first.
    written_bytes = made.sprout.writable.backing_file.stat().st_blocks * 512
    if written_bytes > _MAX_WRITTEN_BYTES:
        raise VoidError(
            f"{format_size(written_bytes)} were written, more than "
            f"{format_size(_MAX_WRITTEN_BYTES)}: the reads did more than read"
        )
    iops = outcome.total_iops
    row: Row = dict.fromkeys(("cpu", "cpu_window_s", "cpu_us_per_io"))
    if usage is not None:
        cores = usage.record()
        row["cpu"] = cores
        row["cpu_window_s"] = usage.window_s
        row["cpu_us_per_io"] = {name: cores[name] * 1e6 / iops for name in _PARTS}
    return row | {
        "front_end": made.server.front_end,
        "total_iops": iops,
        "job_iops": list(outcome.job_iops),
        "latency_us": dict(outcome.latency_us),
        "checked_reads": checked,
        "written_bytes": written_bytes,
        "load": os.getloadavg()[0],
    }


def _check(path: Path, contents: content.Contents, reader: Reader, when: str) -> int:
    size_bytes = sum(piece.size_bytes for piece in contents.pieces)
    try:
        return content.check(path, contents, content.check_ranges(size_bytes), reader)
    except (content.WrongDataError, OSError, EOFError) as error:
        raise VoidError(f"{when} the run: {error}") from error


def _run_fio(
    configuration: Configuration, server: BlockServer, path: Path, directory: Path
) -> tuple[Outcome, Usage | None]:
    """Return no usage if it ran too briefly to be watched."""
    runtime_s = configuration.runtime_s
    workload = Workload(
        "randread",
        "randread",
        BLOCK_BYTES,
        configuration.engine,
        configuration.depth,
        configuration.jobs,
    )
    return run_fio(
        workload,
        path,
        size_bytes=configuration.total_clone_bytes,
        direct=configuration.direct,
        ramp_s=min(1.0, max(0.2, runtime_s / 10)),
        runtime_s=runtime_s,
        output=directory / "fio.json",
        server_pids=[server.pid],
    )
