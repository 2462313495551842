"""The state of a prefetch that a server runs (csrc/lazy/prefetch.h)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from btrfs_ublk.base.records import dataclass

RUNNING = "running"


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """The state of a prefetch. Of the units that were asked for, some were found in the
    cache, fetched into it, have failed, or were left out because the cache has no room
    for them (``holds_bytes`` is what it can hold besides what is pinned). ``state`` is
    "running", "done", "cancelled" or "failed" (``why``); ``bytes_per_s`` is the limit,
    0: none."""

    id: int
    state: str
    why: str | None
    units: int
    cached_units: int
    fetched_units: int
    failed_units: int
    uncached_units: int
    fetched_bytes: int
    bytes_per_s: int
    holds_bytes: int
    percent: float
    seconds: float

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    @property
    def done_units(self) -> int:
        """The number of units that are finished, with or without success."""
        failed = self.failed_units + self.uncached_units
        return self.cached_units + self.fetched_units + failed

    @property
    def is_complete(self) -> bool:
        """Whether all units are in the cache, or were when the prefetch reached
        them."""
        return self.state == "done" and not self.failed_units + self.uncached_units

    @classmethod
    def parse(cls, found: Mapping[str, Any] | None) -> Prefetch | None:
        """Parse a part of a reply or of statistics. None: there was no prefetch."""
        if found is None:
            return None
        return cls(**{item.name: found[item.name] for item in fields(cls)})
