"""Rows of the benchmark matrix, and reports made of them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from btrfs_ublk.bench.config import Configuration, configuration_of
from btrfs_ublk.bench.environment import environment_id
from btrfs_ublk.bench.matrices import FORMAT_VERSION, MATRICES, run_key
from btrfs_ublk.bench.page.build import Page, build
from btrfs_ublk.bench.page.inputs import read_inputs
from btrfs_ublk.bench.run import Row

ENVIRONMENT = "0123456789ab"


def full_row(
    configuration: Configuration, *, iops: float | None = 100.0, status: str = "ok"
) -> Row:
    return configuration.to_dict() | {
        "total_iops": iops,
        "job_iops": [iops],
        "status": status,
        "reason": "because",
        "environment": ENVIRONMENT,
    }


def runs_in(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "run"]


Record = dict[str, Any]

#: What would run, were it not escaped, and what other programs take for a formula.
HOSTILE = "<script>alert('peer')</script>\"><img src=x onerror=alert(1)> $x_1$ \u202e"


def record() -> Record:
    """An environment that is nobody's."""
    return {
        "time": "2024-01-01T00:00:00Z",
        "kernel": "6.99.0-test",
        "architecture": "x86_64",
        "cpu": "Test CPU",
        "cpu_flags": ["hypervisor", "erms"],
        "cpus": 4,
        "guest": None,
        "memory_bytes": 8 << 30,
        "file_system": "tmpfs",
        "file_system_bytes": 8 << 30,
        "file_system_free_bytes": 4 << 30,
        "loop_direct_io": False,
        "load": [0.1, 0.2, 0.3],
        "nice": 0,
        "btrfs_ublk": "0.0.1",
        "revision": "0123456789ab",
        "btrfs_progs": "btrfs-progs v0",
        "fio": "fio-3.99",
        "server": "0123456789ab",
        "mitigations": {"spectre_v2": "Mitigation: some; and more"},
        "python": "3.99",
    }


def comparison(
    *,
    peers: tuple[str, ...] = ("btrfs-brd", "null_blk", "ublk-clone"),
    workloads: tuple[str, ...] = ("randread-psync", "randread-uring-d64"),
    turns: int = 8,
) -> Record:
    """A document of `bench compare`, in which each peer's figures are those of the
    first, times a factor, and all of one turn times the same.
    """
    chances = random.Random(7)
    results: list[Record] = []
    for turn in range(1, turns + 1):
        for workload in workloads:
            luck = chances.uniform(0.9, 1.1)
            for number, peer in enumerate(peers):
                factor = 1 + 0.25 * number
                results.append(
                    {
                        "comparison": "one / <b>two</b>",
                        "run": "a",
                        "peer": peer,
                        "layer": "file",
                        "workload": workload,
                        "turn": turn,
                        "status": "ok",
                        "iops": 100_000 * factor * luck,
                        **dict.fromkeys(("p50_us", "p99_us", "cpu_us"), 9.0),
                        **dict.fromkeys(("fio_us", "server_us", "kernel_us"), 3.0),
                        "cores": 1.5 * factor,
                        "other_cores": 0.02,
                    }
                )
    results.append(
        {
            "comparison": "one / <b>two</b>",
            "peer": "brd",
            "status": "skipped",
            "reason": "the module brd: <i>not</i> here",
        }
    )
    told: Record = {
        "title": "one / <b>two</b>",
        "peers": [*peers, "brd"],
        "workloads": list(workloads),
        "bars": [],
    }
    parameters: Record = {
        "suite": None,
        "turns": turns,
        "runtime_s": 3.0,
        "size_bytes": 256 << 20,
        "queues": None,
        "depth": None,
        "seed": 1,
        "hog": None,
        "comparisons": [told],
    }
    return {
        "version": 1,
        "benchmark": "compare",
        "parameters": parameters,
        "environment": record(),
        "results": results,
    }


def matrix_lines(*, blocks: int) -> list[Record]:
    """A file of results of the matrix "quick"."""
    machine = record()
    matrix = MATRICES["quick"].with_options(front_end="fuse", source="memset")
    identifier = environment_id(machine)
    first = matrix.configurations[0].to_dict()
    lines: list[Record] = [
        {
            "kind": "matrix",
            "version": FORMAT_VERSION,
            "matrix": "quick",
            "seed": 1,
            **{key: first[key] for key in ("front_end", "source", "fio.runtime")},
            "fingerprint": matrix.fingerprint(),
            "configurations": len(matrix.configurations),
        },
        {"kind": "environment", "id": identifier, **machine},
    ]
    for block in range(1, blocks + 1):
        for configuration in matrix.order(block, seed=1):
            row = full_row(configuration) | {
                "cpu": {"total": 0.8, "fio": 0.4, "server": 0.2, "rest": 0.2},
                "cpu_us_per_io": {"total": 9.0, "fio": 4.0, "server": 3.0, "rest": 2.0},
                "latency_us": {"p50": 50.0, "p99": 99.0, "p99.99": 999.0},
                "load": 0.5,
                "environment": identifier,
            }
            key = run_key(configuration_of(row), environment=identifier, block=block)
            lines.append({"kind": "run", "key": key, "block": block} | row)
    return lines


def write_lines(path: Path, lines: list[Record]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def write_document(path: Path, document: Record) -> Path:
    path.write_text(json.dumps(document))
    return path


def page_of(paths: Sequence[Path]) -> Page:
    return build(read_inputs(paths))


def hostile_comparison() -> Record:
    """Names that are code, long, and many."""
    names = (
        HOSTILE,
        "ublk-clone",
        "a-peer-with-a-name-that-is-much-longer-than-any-line-of-a-narrow-plot-can-be",
        "W" * 70,
        *(f"peer-number-{number}" for number in range(9)),
    )
    document = comparison(peers=names, turns=6)
    document["environment"]["cpu"] = f"CPU {HOSTILE}"
    document["environment"]["revision"] = HOSTILE
    return document
