"""What the benchmarks of fetching make of what they have measured."""

from __future__ import annotations

from typing import Any

from btrfs_ublk.bench import fetching, lazy_memory
from btrfs_ublk.units import GIB, MIB, TIB


def test_medians_of_turns() -> None:
    def turn(device: float, bare: float) -> dict[str, Any]:
        shares = {"front_end_us": 10.0, "sha256_us": 2.0}
        return {
            "what": "random",
            "unit": 4096,
            "p50_us": device,
            "bare_us": bare,
        } | shares

    results = [turn(60.0, 40.0), turn(900.0, 45.0), turn(72.0, 40.0)]
    results += [{"what": "sequential", "ours_s": 2.0, "curl_s": 1.0}]
    parameters = {"size_bytes": GIB, "round_trip_ms": 20}
    sequential, latencies = fetching.tables(
        {"results": results, "parameters": parameters}
    )
    assert sequential.rows == [("1 GiB", "1", "512", "1,024", "0.50")]
    assert latencies.rows == [
        ("4 KiB", "3", "72.0", "10.0", "2.0", "40.0", "1.80", "1.50")
    ]


def test_memory_of_stages() -> None:
    stages = [("started", {}), ("read", {"iops": 1000.0})]
    results = [
        {"stage": stage, "resident": 50 * MIB, "most": 60 * MIB} | more
        for stage, more in stages
    ]
    parameters = {"mappings": 7, "size_bytes": TIB}
    (table,) = lazy_memory.tables({"results": results, "parameters": parameters})
    assert table.rows == [
        ("started", "50.0", "60.0", "-"),
        ("read", "50.0", "60.0", "1,000"),
    ]
