"""The known matrices, parts of them, and the order of their runs."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from btrfs_ublk.bench.config import Configuration, parse_value
from btrfs_ublk.errors import UsageError

FORMAT_VERSION = 1

_ENGINES = (("io_uring", 4), ("io_uring", 16), ("mmap", 8), ("psync", 8))
_SEEDS = (("fallocate", "275G"), ("mega-extent", "275G"), ("mega-extent", "4E"))
_CLONES = ("2G", "200G")
_JOBS = ((1, 2), (2, 2), (6, 3), (12, 3))


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


def _configuration(
    seed: tuple[str, str],
    clone: str,
    engine: tuple[str, int],
    jobs: tuple[int, int],
    runtime: float,
) -> Configuration:
    return Configuration.from_dict(
        {
            "btrfs.seed": seed[0],
            "btrfs.virtual_data_size": seed[1],
            "btrfs.total_clone_size": clone,
            "fio.depth": engine[1],
            "fio.direct": 1,
            "fio.engine": engine[0],
            "fio.jobs": jobs[0],
            "fio.runtime": runtime,
            "ublk.num_queues": jobs[1],
        }
    )


def _full() -> Iterator[Configuration]:
    for seed, clone, engine, jobs in product(_SEEDS, _CLONES, _ENGINES, _JOBS):
        yield _configuration(seed, clone, engine, jobs, 10)


def _quick() -> Iterator[Configuration]:
    """Yield one seed with every engine and two numbers of jobs; then, with two jobs,
    the other seeds and clones: enough for each comparison of the summary.
    """
    base, runtime = ("mega-extent", "4E"), 2
    for engine, jobs in product(_ENGINES, _JOBS[:2]):
        yield _configuration(base, "2G", engine, jobs, runtime)
    for engine in _ENGINES[1:]:
        for seed in _SEEDS[:2]:
            yield _configuration(seed, "2G", engine, _JOBS[1], runtime)
        yield _configuration(base, "200G", engine, _JOBS[1], runtime)


#: The matrices by name; add new ones here.
MATRICES = {
    "full": Matrix("full", tuple(_full()), least=10, most=30),
    "quick": Matrix("quick", tuple(_quick()), least=3, most=3),
}


def describe(configuration: Configuration) -> str:
    """Describe it: "mega-extent 4E/2G io_uring x16, 2 jobs, 2 queues"."""
    values = configuration.to_dict()
    return (
        f"{values['btrfs.seed']} {values['btrfs.virtual_data_size']}/"
        f"{values['btrfs.total_clone_size']} {configuration.engine} "
        f"x{configuration.depth}, {configuration.jobs} jobs, "
        f"{configuration.num_queues} queues"
    )
