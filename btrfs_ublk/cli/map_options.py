"""What the commands about maps of devices have in common; not a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from btrfs_ublk.base.entry import completing, json_option, stacked
from btrfs_ublk.device.state import device_directories
from btrfs_ublk.units import exact_size, format_size

device_argument = click.argument(
    "device", shell_complete=completing(lambda: (x.name for x in device_directories()))
)
#: --map and --json.
which_map = stacked(
    click.option(
        "--map", "path", metavar="FILE", help="Which map, where the device has several."
    ),
    json_option,
)

_INDENT = "  "
_MS = 1e6
_SECTIONS = ("fetcher", "cache", "prefetch", "complete")


def no_room_text(holds_bytes: int) -> str:
    """Explain that the cache cannot hold more."""
    return (
        f"the cache can hold {format_size(holds_bytes)} besides what is pinned, and the"
        " rest was not fetched: make room on its disk, or allow it more"
        " (btrfs-ublk cache limit; of a volume: volume up --cache-max)"
    )


def stats_lines(found: Mapping[str, Any]) -> list[str]:
    """Format a map's ``stats()``. Histograms are summarised; JSON has all of them."""
    rows = [
        ("map", str(found["map"])),
        ("cache", found["cache_directory"] or "none"),
        ("room", f"{exact_size(found['start'])} to {exact_size(found['end'])}"),
        ("mappings", f"{found['mappings']:,}"),
        ("sources", f"{found['sources']:,}"),
        *((kind, format_size(size)) for kind, size in found["bytes"].items()),
    ]
    for name in _SECTIONS:
        if section := found.get(name):
            # NB: the first part has already named the cache's directory.
            known = {key: one for key, one in section.items() if key != "directory"}
            rows += [(name, ""), *((_INDENT + key, one) for key, one in _rows(known))]
    width = max(len(key) for key, _ in rows)
    return [f"{key:{width}}  {text}".rstrip() for key, text in rows]


def _rows(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in section.items():
        if name == "hosts":
            for host, about in value.items():
                yield "host", host or "local files"
                yield from ((_INDENT + key, text) for key, text in _rows(about))
        elif name == "latencies":
            for one in value:
                yield f"{one['kind']} requests", _summary(one)
        elif isinstance(value, Mapping):
            several = (_one_of(what, n) for what, n in value.items() if n)
            yield _words(name), ", ".join(several) or "0"
        else:
            yield _words(name), _text(name, value)


def _one_of(what: str, value: Any) -> str:
    """Return one of several numbers, truths or lists that a line has."""
    if isinstance(value, list):
        return f"{_words(what)} {' and '.join(value)}"
    return _words(what) if value is True else f"{value:,} {_words(what)}"


def _summary(latency: Mapping[str, Any]) -> str:
    where = f" to {latency['host']}" if latency["host"] else ""
    p50, p99 = (f"{latency[p] / _MS:,.3g} ms" for p in ("p50_ns", "p99_ns"))
    return f"{latency['count']:,}{where}, p50 {p50}, p99 {p99}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "max_bytes" and value == 0:
        return "no limit"
    if name == "bytes_per_s":
        return f"{format_size(round(value))}/s"
    if "bytes" in name.split("_"):
        return format_size(value)
    if name == "percent":
        return f"{value:.1f} %"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
