"""What the tests of the matrix and of its command share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from btrfs_ublk.bench.config import Configuration
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
