"""How far a prefetch is that a server was asked for (csrc/lazy/prefetch.h)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

RUNNING = "running"


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Units of those that were asked for: found in the cache, fetched into it, failed,
    and fetched in vain, because the cache did not take them. ``state`` is "running",
    "done", "cancelled" or "failed" (``why``); ``bytes_per_s`` is the limit, 0: none.
    """

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
    percent: float
    seconds: float

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    @property
    def done_units(self) -> int:
        """Whatever has become of them."""
        failed = self.failed_units + self.uncached_units
        return self.cached_units + self.fetched_units + failed

    @property
    def is_complete(self) -> bool:
        """All units are in the cache, or were when it came to them."""
        return self.state == "done" and not self.failed_units + self.uncached_units

    @classmethod
    def parse(cls, found: Mapping[str, Any] | None) -> Prefetch | None:
        """Of a reply, or of statistics. None: there was no prefetch."""
        if found is None:
            return None
        return cls(**{item.name: found[item.name] for item in fields(cls)})
