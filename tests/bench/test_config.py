"""The keys of a benchmark run: what is accepted, and what is said of the rest."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from btrfs_ublk.bench.config import Configuration, configuration_of
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


def test_unknown_keys_are_named() -> None:
    with pytest.raises(UsageError, match="unknown option 'fio.job', 'x'") as caught:
        Configuration.from_dict(GOOD | {"fio.job": 1, "x": 2})
    assert caught.value.hint is not None and "fio.jobs" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("btrfs.seed", "giga-extent"),
        ("btrfs.virtual_data_size", "4X"),
        ("btrfs.total_clone_size", "5000"),
        ("btrfs.total_clone_size", "5E"),
        ("fio.depth", 0),
        ("fio.direct", 2),
        ("fio.engine", "windowsaio"),
        ("fio.jobs", -1),
        ("fio.runtime", float("nan")),
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


@given(st.integers(0, (1 << 63) - 1))
def test_exact_sizes_are_exact(size_bytes: int) -> None:
    assert parse_size(exact_size(size_bytes)) == size_bytes
