"""The benchmarks that mount, scaled down: plausible numbers, and nothing is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.needs import Need

from btrfs_ublk.base.capabilities import BTRFS_PROGS, Helper
from btrfs_ublk.base.helpers import MAKE_FILES, MAP_PHYSICAL, MKSEED
from btrfs_ublk.bench import seed
from btrfs_ublk.bench.files import PlannedFile
from btrfs_ublk.bench.measurements import cloning
from btrfs_ublk.bench.measurements.cloning import stamp, verify, verify_physical
from btrfs_ublk.bench.report import Result, tables_of
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.reflink import clone_file
from btrfs_ublk.seed import make_seed
from btrfs_ublk.units import EIB, GIB
from btrfs_ublk.volume.sprout import sprout
from btrfs_ublk.volume.temporary import virtual_file_of

BLOCK = 4096


@pytest.fixture(autouse=True)
def _needs(need: Need) -> None:
    need(Helper(MKSEED), Helper(MAKE_FILES), Helper(MAP_PHYSICAL))


def invoke(command: click.Command, *words: str | Path) -> dict[str, Any]:
    """Run a benchmark for JSON: its document."""
    done = CliRunner().invoke(command, [*map(str, words), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    document: dict[str, Any] = json.loads(done.stdout)
    assert all(table.rows for table in tables_of(document))
    return document


def assert_plausible(result: Result, *, files: int, processes: int = 1) -> None:
    assert (result["files"], result["processes"]) == (files, processes)
    assert 0 < result["rate"] < 1e6
    assert 0 < result["p50_us"] <= result["p99_us"] <= result["p99.9_us"]
    assert result["p99.9_us"] <= result["max_us"] <= result["wall_s"] * 1e6
    assert 1 < result["cpu_us"]
    assert result["load"] >= 0 and result["other_cores"] >= 0


@pytest.mark.device
class TestClone:
    @pytest.mark.parametrize(
        ("processes", "sources"), [(1, "shared"), (2, "shared"), (2, "own")]
    )
    def test_what_is_measured(
        self, need: Need, sparse_path: Path, processes: int, sources: str
    ) -> None:
        need(BTRFS_PROGS)
        result = cloning.measure(sparse_path, 501, processes, sources, samples=100)
        assert_plausible(result, files=501, processes=processes)
        # Inode, name, reference and extent: some hundred bytes, in few tree blocks.
        assert 200 < result["metadata_bytes"] < 2000
        assert 0 < result["rate_with_sync"] < result["rate"]
        for name in ("unmount_s", "mount_s"):
            assert 0 < result[name] < 60

    def test_wrong_clones_are_found(self, sparse_path: Path) -> None:
        good = PlannedFile(0, GIB // 2, 5 * BLOCK - 7)
        seed = make_seed(sparse_path / "seed.img", virtual_data_size=GIB)
        stamp(seed, [good])
        target = sparse_path / "mount"
        target.mkdir()
        with (
            loop_device(seed.path, read_only=True) as below,
            sprout(below.path, target, parent=sparse_path),
            virtual_file_of(seed, target) as source,
        ):
            path = target / "clone"
            start = seed.virtual_data.device_offset
            clone_file(source, path, source_offset=good.offset, size_bytes=good.size)
            verify([(path, good)])
            verify_physical(start, [(path, good)])
            elsewhere = PlannedFile(0, good.offset + BLOCK, good.size)
            with pytest.raises(BtrfsUblkError, match="not virtual data from"):
                verify([(path, elsewhere)])
            with pytest.raises(BtrfsUblkError, match="mapped to"):
                verify_physical(start, [(path, elsewhere)])
            shorter = PlannedFile(0, good.offset, good.size - 1)
            with pytest.raises(BtrfsUblkError, match="bytes, not"):
                verify([(path, shorter)])
            # The right extents with other content: there is no stamp.
            unstamped, path = PlannedFile(0, BLOCK, BLOCK), target / "unstamped"
            clone_file(source, path, source_offset=BLOCK, size_bytes=BLOCK)
            with pytest.raises(BtrfsUblkError, match="not virtual data from"):
                verify([(path, unstamped)])


@pytest.mark.device
class TestSeed:
    def test_each_step_takes_its_time(self, sparse_path: Path) -> None:
        result = seed.measure(seed.SeedSize(4 * EIB), parent=sparse_path)
        assert result["chunks"] == 16_449 and result["stub_chunk"]
        assert 6e6 < result["metadata_bytes"] <= result["allocated_bytes"] < 8e6
        for name in seed.STEPS:
            assert 0 < result[name] < 10

    def test_its_command(self, sparse_path: Path) -> None:
        document = invoke(
            seed.command,
            *("--seed=1G", "--seed=8G:4G", "--repeats=2", "--parent", sparse_path),
        )
        assert [each["chunks"] for each in document["results"]] == [1, 2, 1, 2]
        (table,) = tables_of(document)
        assert [row[:3] for row in table.rows] == [
            ("1 GiB", "1", "2"),
            ("8 GiB", "2", "2"),
        ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (seed.command, ["--repeats", "none"]),
        (seed.command, ["--seed", "4E:x"]),
        (seed.command, ["--parent", "/nowhere"]),
        (seed.command, ["argument"]),
    ],
)
def test_wrong_usage_makes_nothing(
    command: click.Command, words: list[str], sparse_path: Path
) -> None:
    parent = ["--parent", str(sparse_path)]
    done = CliRunner().invoke(command, [*parent, *words])
    status = getattr(done.exception, "exit_status", done.exit_code)
    assert status == 2 and (isinstance(done.exception, (UsageError, SystemExit)))
    assert not list(sparse_path.iterdir())
    assert CliRunner().invoke(command, ["--help"]).exit_code == 0
