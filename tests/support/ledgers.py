"""Ledgers of processes that end in any way."""

from __future__ import annotations

import json
from pathlib import Path

from btrfs_ublk.base import ledger as module


def abandon(directory: Path, *records: dict[str, object], tail: str = "") -> Path:
    """A ledger as a dead process leaves it."""
    path = directory / "1-dead.ledger"
    header = {"version": 1, "boot_id": module.boot_id(), "pid": 1, "start_ticks": 0}
    text = "".join(json.dumps(record) + "\n" for record in [header, *records])
    path.write_text(text + tail)
    return path


def enter(
    sequence: int, name: str, kind: str = "thing", **more: object
) -> dict[str, object]:
    details = {"name": name, **more}
    return {"enter": sequence, "kind": kind, "tag": "0" * 16, "details": details}
