"""One benchmark run: what it measures, what voids it, what it leaves."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.needs import Need
from support.system_state import SystemState
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, Fio, Helper
from btrfs_ublk.base.helpers import MAP_PHYSICAL, MKSEED, SERVER
from btrfs_ublk.bench.config import Configuration
from btrfs_ublk.bench.environment import environment
from btrfs_ublk.bench.run import Row, run_configuration
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.units import MIB

BASE: dict[str, Any] = {
    "btrfs.seed": "mega-extent",
    "btrfs.virtual_data_size": "275G",
    "btrfs.total_clone_size": "2G",
    "fio.depth": 4,
    "fio.direct": 1,
    "fio.engine": "psync",
    "fio.jobs": 1,
    "fio.runtime": 1,
    "ublk.num_queues": 1,
    "front_end": "fuse",
    "source": "pattern",
}
SEED = 20261121
SIGNALS = 6
#: How long a slow machine may take until something shows up.
PATIENCE_S = 120.0

Measure = Callable[..., Row]


@pytest.fixture(autouse=True)
def _needs(need: Need) -> None:
    need(BTRFS, LOOP, Fio("psync"), Helper(MKSEED), Helper(SERVER))
    need(Helper(MAP_PHYSICAL))


@pytest.fixture
def measure(sparse_path: Path) -> Measure:
    """A run with the changed keys."""

    def _measure(changed: dict[str, Any], **options: Any) -> Row:
        return run_configuration(
            Configuration.from_dict(BASE | changed),
            parent=sparse_path,
            environment=environment(sparse_path),
            **options,
        )

    return _measure


@pytest.fixture
def fuse(need: Need) -> None:
    need(FUSE)


needs_fuse = pytest.mark.usefixtures("fuse")


def check_measured(row: Row, wanted: dict[str, Any]) -> None:
    assert row["status"] == "ok", row
    assert row.items() >= wanted.items()
    assert len(row["job_iops"]) == row["fio.jobs"]
    assert row["total_iops"] == pytest.approx(sum(row["job_iops"]))
    assert 50 < row["total_iops"] < 1e7
    latency = row["latency_us"]
    names = ("p50", "p90", "p95", "p99", "p99.9", "p99.99", "max")
    assert sorted(latency.values()) == [latency[name] for name in names]
    assert row["checked_reads"] == 60 and row["written_bytes"] < 10 * MIB
    assert row["versions"]["fio"].startswith("fio-") and len(row["environment"]) == 12
    assert_accounted(row)


@pytest.mark.parametrize(
    "changed",
    [
        {"fio.engine": "io_uring", "fio.jobs": 3, "ublk.num_queues": 2},
        {"fio.engine": "mmap", "btrfs.total_clone_size": "200G"},
    ],
    ids=["io_uring", "mmap-200G"],
)
def test_what_is_measured(
    need: Need, measure: Measure, front_end: FrontEndName, changed: dict[str, Any]
) -> None:
    need(Fio(changed["fio.engine"]))
    wanted = BASE | changed | {"front_end": front_end}
    check_measured(json.loads(json.dumps(measure(wanted))), wanted)


def assert_accounted(row: Row) -> None:
    cpu = row["cpu"]
    if cpu is None:  # fio had ended before it could be looked at, on a slow machine
        return
    assert 0 < cpu["total"] <= (os.cpu_count() or 1) * 1.05
    assert cpu["fio"] + cpu["server"] + cpu["rest"] == pytest.approx(cpu["total"])
    costs = row["cpu_us_per_io"]
    assert costs["fio"] + costs["server"] + costs["rest"] == pytest.approx(
        costs["total"]
    )


def wait_for_fio(parent: Path, *, timeout_s: float) -> Path:
    """The directory of the run in which fio reads; the first check is over then."""

    def reads() -> Path | None:
        for path in parent.glob("btrfs-ublk-*/mnt/clone"):
            if any(is_fio_of(x, parent) for x in Path("/proc").glob("[0-9]*")):
                return path.parent.parent
        return None

    found = wait_until(reads, f"no fio in {parent}", timeout_s=timeout_s)
    assert found is not None
    return found


@contextmanager
def meanwhile(parent: Path, act: Callable[[Path], None]) -> Iterator[None]:
    """``act(directory of the run)`` as soon as fio is there."""
    thread = threading.Thread(
        target=lambda: act(wait_for_fio(parent, timeout_s=PATIENCE_S))
    )
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE_S)


def is_fio_of(process: Path, parent: Path) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[0].endswith(b"fio") and str(parent).encode() in b"".join(words)


@pytest.mark.device
@needs_fuse
def test_a_wrong_byte_voids_the_run(measure: Measure, sparse_path: Path) -> None:
    def corrupt(directory: Path) -> None:
        with (directory / "mnt/clone").open("r+b") as file:
            file.write(b"\xff")

    with meanwhile(sparse_path, corrupt):
        row = measure({"btrfs.total_clone_size": "16M", "fio.runtime": 3})
    assert row["status"] == "void" and row["total_iops"] is None
    assert "after the run: wrong data: byte 0 is ff, not 00" in row["reason"]


@pytest.mark.device
@needs_fuse
def test_a_run_that_writes_is_void(measure: Measure, sparse_path: Path) -> None:
    def write(directory: Path) -> None:
        with (directory / "mnt" / "new").open("wb") as file:
            file.write(os.urandom(12 * MIB))
            os.fsync(file.fileno())

    with meanwhile(sparse_path, write):
        row = measure({"fio.runtime": 3})
    assert row["status"] == "void" and "were written, more than 10 MiB" in row["reason"]


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "btrfs_ublk.cli.main", "bench", *map(str, words)]


class TestCommand:

    @pytest.mark.device
    @needs_fuse
    def test_interrupted_at_any_moment_it_leaves_nothing(
        self, sparse_path: Path, state_of_system: Callable[[], SystemState]
    ) -> None:
        options = json.dumps(BASE)
        words = command("run", "--parent", sparse_path, "--json-opts", options)
        begin_s = time.monotonic()
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
        took_s = time.monotonic() - begin_s
        moments = random.Random(SEED)
        before = state_of_system()
        for number in range(SIGNALS):
            with subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as process:
                time.sleep(took_s * moments.uniform(number, number + 1) / SIGNALS)
                process.send_signal(signal.SIGINT)
                output, talk = process.communicate(timeout=PATIENCE_S)
            # Early and late, Python itself ends the process, or it has ended.
            assert process.returncode in (130, -signal.SIGINT, 0), talk
            assert output or process.returncode != 0
            assert not output or json.loads(output)  # whole, or nothing
            assert state_of_system() == before, f"signal {number}: {talk}"
