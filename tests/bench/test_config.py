"""The keys of a benchmark run: what is accepted, and what is said of the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from btrfs_ublk.bench.commands.run import DEFAULTS
from btrfs_ublk.bench.config import (
    ENGINES,
    REQUIRED,
    SOURCES,
    Configuration,
    configuration_of,
    parse_value,
)
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import EIB, GIB, exact_size, parse_size

GOOD: dict[str, Any] = {
    "btrfs.seed": "mega-extent",
    "btrfs.virtual_data_size": "4E",
    "btrfs.total_clone_size": "200G",
    "fio.depth": 16,
    "fio.direct": 1,
    "fio.engine": "io_uring",
    "fio.jobs": 12,
    "fio.runtime": 10,
    "ublk.num_queues": 3,
}


def test_the_nine_keys_come_back_as_they_were() -> None:
    configuration = Configuration.from_json(json.dumps(GOOD))
    assert configuration.virtual_data_bytes == 4 * EIB
    assert configuration.total_clone_bytes == 200 * GIB
    added = {"front_end": "auto", "source": "memset"}
    assert configuration.to_dict() == GOOD | added
    assert configuration_of(GOOD | added | {"total_iops": 1}) == configuration


def test_spellings_of_one_value_are_equal() -> None:
    spelled = GOOD | {
        "btrfs.virtual_data_size": " 4eib",
        "btrfs.total_clone_size": 200 << 30,
        "fio.direct": True,
        "fio.runtime": 10.0,
    }
    assert Configuration.from_dict(spelled) == Configuration.from_dict(GOOD)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str) -> None:
    values = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(UsageError, match=f"missing option {key}\n"):
        Configuration.from_dict(values)


def test_unknown_keys_are_named() -> None:
    with pytest.raises(UsageError, match="unknown option 'fio.job', 'x'") as caught:
        Configuration.from_dict(GOOD | {"fio.job": 1, "x": 2})
    assert caught.value.hint is not None and "fio.jobs" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("btrfs.seed", "giga-extent"),
        ("btrfs.virtual_data_size", "4X"),
        ("btrfs.virtual_data_size", None),
        ("btrfs.total_clone_size", "5000"),
        ("btrfs.total_clone_size", "8K"),
        ("btrfs.total_clone_size", True),
        ("btrfs.total_clone_size", "5E"),
        ("fio.depth", 0),
        ("fio.depth", "16"),
        ("fio.depth", 16.5),
        ("fio.direct", 2),
        ("fio.direct", "1"),
        ("fio.engine", "windowsaio"),
        ("fio.engine", ["psync"]),
        ("fio.jobs", True),
        ("fio.jobs", -1),
        ("fio.runtime", 0),
        ("fio.runtime", float("nan")),
        ("fio.runtime", "10s"),
        ("ublk.num_queues", 1000),
        ("front_end", "nbd"),
        ("source", "disk"),
    ],
)
def test_wrong_values_name_their_key(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=key.replace(".", r"\.")):
        Configuration.from_dict(GOOD | {key: value})


@pytest.mark.parametrize("text", ["", "[]", "null", '"x"', "{", '{"a": 1, "a": 2}'])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="option"):
        Configuration.from_json(text)


def test_values_that_somebody_types() -> None:
    assert parse_value("btrfs.total_clone_size", "2GiB") == "2G"
    assert parse_value("fio.depth", "16") == 16
    assert parse_value("fio.engine", "psync") == "psync"
    assert parse_value("fio.direct", "true") == 1
    with pytest.raises(UsageError, match="there is no key 'engine'"):
        parse_value("engine", "psync")
    with pytest.raises(UsageError, match="fio.depth"):
        parse_value("fio.depth", "deep")


@given(
    st.sampled_from(ENGINES),
    st.sampled_from(SOURCES),
    st.integers(4, 1 << 40),
    st.floats(0.5, 1000),
    st.integers(1, 256),
)
def test_what_is_written_is_read_back(
    engine: str, source: str, blocks: int, runtime_s: float, jobs: int
) -> None:
    configuration = Configuration(
        seed="fallocate",
        virtual_data_bytes=1 << 62,
        total_clone_bytes=blocks * 4096,
        depth=jobs,
        direct=False,
        engine=engine,
        jobs=jobs,
        runtime_s=runtime_s,
        num_queues=jobs,
        source=source,
    )
    assert Configuration.from_json(json.dumps(configuration.to_dict())) == configuration


@given(st.integers(0, (1 << 63) - 1))
def test_exact_sizes_are_exact(size_bytes: int) -> None:
    assert parse_size(exact_size(size_bytes)) == size_bytes


def test_exact_sizes_are_short() -> None:
    texts = [exact_size(size) for size in (0, 4097, 4096, 275 * GIB, 4 * EIB)]
    assert texts == ["0", "4097", "4K", "275G", "4E"]


def test_what_is_not_given_has_defaults_where_there_are() -> None:
    made = Configuration.from_json('{"fio.jobs": 7}', defaults=GOOD)
    assert made.to_dict() == Configuration.from_dict(GOOD | {"fio.jobs": 7}).to_dict()
    with pytest.raises(UsageError, match="unknown option"):
        Configuration.from_json('{"other": 7}', defaults=GOOD)
    Configuration.from_json("{}", defaults=DEFAULTS)  # of `bench run`: all are there
