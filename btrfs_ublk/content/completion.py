"""The state of the background completion of a map (csrc/lazy/complete.h)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from btrfs_ublk.units import exact_size, format_size


@dataclass(frozen=True, kw_only=True)
class Completion:
    """How far a server has come with fetching all that its map names. ``state`` is
    "fetching", "paused" (others come first), "retrying" (something failed), "full" (the
    cache has no room) or "done"; ``why`` is a reason for people. ``done_units`` of
    ``units`` are in the cache, also those that others fetched; this server has fetched
    ``fetched_bytes``, and ``failed_units`` failed, each time that they were tried.
    ``bytes_per_s`` is the limit, 0: "idle"."""

    state: str
    why: str | None
    bytes_per_s: int
    units: int
    done_units: int
    bytes: int
    done_bytes: int
    fetched_bytes: int
    failed_units: int

    @property
    def is_done(self) -> bool:
        return self.state == "done"

    def text(self) -> str:
        """Describe it in a line, for people."""
        rate = f"{exact_size(self.bytes_per_s)}/s" if self.bytes_per_s else "idle"
        why = f": {self.why}" if self.why else ""
        return (
            f"{self.state}{why}; {self.done_units:,} of {self.units:,} units, "
            f"{format_size(self.done_bytes)} of {format_size(self.bytes)} ({rate})"
        )

    @classmethod
    def parse(cls, found: Mapping[str, Any] | None) -> Completion | None:
        """Parse a part of a reply or of statistics. None: there is no completion."""
        if found is None:
            return None
        return cls(**{item.name: found[item.name] for item in fields(cls)})
