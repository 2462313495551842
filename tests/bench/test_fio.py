"""fio: its output, its absence, its age."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from btrfs_ublk.bench.fio import histogram_quantiles, parse_output
from btrfs_ublk.bench.stats import quantile
from btrfs_ublk.errors import BtrfsUblkError


def job(iops: float, bins: dict[str, int], **changed: Any) -> dict[str, Any]:
    read = {"iops": iops, "total_ios": sum(bins.values()), "clat_ns": {"bins": bins}}
    return {"error": 0, "ctx": 30, "read": read} | changed


def test_jobs_are_added_up() -> None:
    jobs = [job(100.5, {"1000": 98, "9000": 1}), job(50.0, {"1000": 1, "20000": 50})]
    outcome = parse_output("fio: a warning\n" + json.dumps({"jobs": jobs}))
    assert outcome.job_iops == (100.5, 50.0) and outcome.total_iops == 150.5
    assert outcome.latency_us["p50"] == 1.0 and outcome.latency_us["p90"] == 20.0
    assert outcome.latency_us["max"] == 20.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not its JSON"),
        ("fio: engine psync not loadable", "not its JSON"),
        ('{"jobs": [{}]}', "not its JSON"),
        ('{"jobs": 5}', "not its JSON"),
        (json.dumps({"jobs": [job(1.0, {"1": 1}, error=5)]}), r"errors: \[5\]"),
        (json.dumps({"jobs": [job(0.0, {})]}), "read nothing"),
    ],
)
def test_what_is_no_result_is_refused(text: str, message: str) -> None:
    with pytest.raises(BtrfsUblkError, match=message):
        parse_output(text)


@given(
    st.dictionaries(st.integers(0, 10**9), st.integers(0, 50), min_size=1),
    st.floats(0.001, 1),
)
def test_quantiles_are_those_of_the_values(
    histogram: dict[int, int], share: float
) -> None:
    values = sorted(v for value, count in histogram.items() for v in [value] * count)
    found = histogram_quantiles(histogram, {"it": share})
    if values:
        assert found == {"it": quantile(values, share), "max": values[-1]}
    else:
        assert found == {}
