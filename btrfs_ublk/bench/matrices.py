"""The matrices of matrices.toml, parts of them, and the order of their runs."""

from __future__ import annotations

import hashlib
import json
import random
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from btrfs_ublk.bench.config import Configuration, parse_value
from btrfs_ublk.errors import UsageError

FORMAT_VERSION = 1

#: What one combination of a part consists of, in this order.
_KEYS = (
    *("btrfs.seed", "btrfs.virtual_data_size", "btrfs.total_clone_size"),
    *("fio.engine", "fio.depth", "fio.jobs", "ublk.num_queues"),
)


@dataclass(frozen=True)
class Matrix:
    """Configurations, and how often each is run: ``least`` times, then up to ``most``
    times until the interval of its median is narrow.
    """

    name: str
    configurations: tuple[Configuration, ...]
    least: int
    most: int

    def with_options(
        self,
        *,
        front_end: str,
        source: str | None = None,
        runtime_s: float | None = None,
        least: int | None = None,
        most: int | None = None,
    ) -> Matrix:
        """Return the matrix with other options, such as runtime. Raises UsageError."""
        least = self.least if least is None else least
        most = max(self.most, least) if most is None else most
        if least > most:
            raise UsageError(
                f"{least} repeats at least, {most} at most",
                hint="--min-repeats must not be above --max-repeats",
            )
        changed = {"front_end": front_end, "source": source, "fio.runtime": runtime_s}
        given = {key: value for key, value in changed.items() if value is not None}
        configurations = tuple(
            Configuration.from_dict(each.to_dict() | given)
            for each in self.configurations
        )
        return Matrix(self.name, configurations, least, most)

    def fingerprint(self) -> str:
        """Return a hash that differs if a configuration does."""
        configurations = [each.to_dict() for each in self.configurations]
        return digest([FORMAT_VERSION, self.name, configurations])

    def order(self, block: int, *, seed: int) -> list[Configuration]:
        """Return all configurations in the order of a block; it depends on the seed."""
        ordered = list(self.configurations)
        random.Random(f"{seed}/{block}").shuffle(ordered)
        return ordered

    def selected(self, filters: Mapping[str, Sequence[Any]]) -> list[Configuration]:
        """Return those that have one of the values of each key. UsageError for none."""
        found = [each for each in self.configurations if _matches(each, filters)]
        if not found:
            values = {
                key: sorted({str(each.to_dict()[key]) for each in self.configurations})
                for key in filters
            }
            raise UsageError(
                f"no configuration of the matrix {self.name} passes the filters",
                hint="; ".join(f"{k}: {', '.join(v)}" for k, v in values.items()),
            )
        return found


def check_version(header: Mapping[str, Any], where: str) -> None:
    """Raise UsageError if the first line of a file of results has another version."""
    if header.get("version") != FORMAT_VERSION:
        raise UsageError(
            f"{where} is of version {header.get('version')!r}, not {FORMAT_VERSION}",
            hint="use the version of btrfs-ublk that wrote it",
        )


def digest(value: object) -> str:
    """Return sixteen digits of the hash of a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_key(configuration: Configuration, *, environment: str, block: int) -> str:
    """Return what identifies a run in a file of results."""
    return digest([configuration.to_dict(), environment, block])


def parse_filters(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Parse "key=value" texts; a key given twice may have either value. Raises
    UsageError.
    """
    filters: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"filter {text!r} is not KEY=VALUE")
        filters.setdefault(key, []).append(parse_value(key, value))
    return filters


def _matches(
    configuration: Configuration, filters: Mapping[str, Sequence[Any]]
) -> bool:
    values = configuration.to_dict()
    return all(values[key] in wanted for key, wanted in filters.items())


def _matrix(
    name: str, *, least: int, most: int, runtime: float, parts: Sequence[Any]
) -> Matrix:
    common = {"fio.direct": 1, "fio.runtime": runtime}
    configurations = tuple(
        Configuration.from_dict(dict(zip(_KEYS, (*kind, *engine, *jobs))) | common)
        for part in parts
        for kind, engine, jobs in product(part["kinds"], part["engines"], part["jobs"])
    )
    return Matrix(name, configurations, least, most)


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MATRICES = {name: _matrix(name, **values) for name, values in _DATA["matrix"].items()}


def describe(configuration: Configuration) -> str:
    """Describe it: "mega-extent 4E/2G io_uring x16, 2 jobs, 2 queues"."""
    values = configuration.to_dict()
    return (
        f"{values['btrfs.seed']} {values['btrfs.virtual_data_size']}/"
        f"{values['btrfs.total_clone_size']} {configuration.engine} "
        f"x{configuration.depth}, {configuration.jobs} jobs, "
        f"{configuration.num_queues} queues"
    )
