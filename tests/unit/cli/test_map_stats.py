"""`btrfs-ublk map stats`, as people read it."""

from __future__ import annotations

from typing import Any

from btrfs_ublk.cli.map_stats import stats_lines

_WIDTH = 80
_FOUND: dict[str, Any] = {
    "map": "/var/lib/btrfs-ublk/volumes/web/map",
    "cache_directory": "/var/cache/web",
    "start": 0,
    "end": 1 << 46,
    "mappings": 1234,
    "sources": 1,
    "bytes": {"computed": 0, "given": 0, "pinned": 4 << 20},
    "fetcher": {
        "units_fetched": 16000,
        "bytes_fetched": 4 << 20,
        "failures": {"transient": 3, "busy": 0, "changed": 1},
        "process": {"running": True, "lacks": ["lock", "priority"], "started": 2},
        "hosts": {"mirror.example.org:8311": {"attempts": 16, "open": False}},
        "latencies": [
            {
                **{"kind": "http", "host": "mirror.example.org:8311", "count": 16},
                **{"p50_ns": 2883584, "p99_ns": 43423005},
                "buckets": [[n << 20, 1] for n in range(16)],
            }
        ],
    },
    "cache": {"directory": "/var/cache/web", "max_bytes": 0, "free_bytes": 3 << 30},
    "prefetch": {"state": "done", "why": None, "bytes_per_s": 1 << 20},
}


def test_every_line_is_a_key_and_a_value() -> None:
    lines = stats_lines(_FOUND)
    assert max(map(len, lines)) <= _WIDTH
    assert not any(character in line for line in lines for character in "{}[]")
    found = {tuple(line.split(maxsplit=2)) for line in lines}
    assert ("mappings", "1,234") in found
    assert ("units", "fetched", "16,000") in found
    assert ("bytes", "fetched", "4 MiB") in found
    assert ("max", "bytes", "no limit") in found
    assert any(line.split() == ["bytes", "per", "s", "1", "MiB/s"] for line in lines)
    assert ("failures", "3", "transient, 1 changed") in found
    assert ("process", "running,", "lacks lock and priority, 2 started") in found
    (latency,) = (line for line in lines if "http requests" in line)
    assert latency.endswith("16 to mirror.example.org:8311, p50 2.88 ms, p99 43.4 ms")
    assert lines.count("cache") == 1 and "prefetch" in lines


def test_what_a_map_has_not_is_left_out() -> None:
    bare = {**_FOUND, "cache_directory": None, "cache": None, "prefetch": None}
    lines = stats_lines(bare)
    assert "cache" not in lines and "prefetch" not in lines
    assert any(line.split() == ["cache", "none"] for line in lines)
