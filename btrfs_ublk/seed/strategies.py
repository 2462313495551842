"""The strategies that make seeds, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from btrfs_ublk.base.ledger import Ledger
from btrfs_ublk.errors import UsageError
from btrfs_ublk.seed.fallocate import make_fallocate_seed
from btrfs_ublk.seed.layout import Seed
from btrfs_ublk.seed.mega_extent import make_seed

MEGA_EXTENT = "mega-extent"

#: The keyword arguments of each function are the strategy's options.
STRATEGIES: dict[str, Callable[..., Seed]] = {
    MEGA_EXTENT: make_seed,
    "fallocate": make_fallocate_seed,
}


def make_seed_by(
    strategy: str, path: Path, *, ledger: Ledger | None = None, **options: Any
) -> Seed:
    """Make a seed with the named strategy, and the options that its function takes.

    Options that are None keep the strategy's default. Raises UsageError for an unknown
    strategy or option.
    """
    make = STRATEGIES.get(strategy)
    if make is None:
        raise UsageError(
            f"there is no strategy {strategy!r}",
            hint=f"choose {' or '.join(STRATEGIES)}",
        )
    known = inspect.signature(make).parameters
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() - known.keys():
        raise UsageError(f"the strategy {strategy} has no {name.replace('_', ' ')}")
    if "ledger" in known:
        given["ledger"] = ledger
    return make(path, **given)
