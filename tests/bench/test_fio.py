"""fio: its output, its absence, its age."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from btrfs_ublk.base.capabilities import Fio
from btrfs_ublk.bench.fio import histogram_quantiles, merged, parse_output
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


def test_histograms_are_added_up() -> None:
    assert merged([{"1": 2, "5": 1}, {"5": 3}, {}]) == {1: 2, 5: 4}


FAKE = """#!/bin/sh
case $1 in
--version) {version} ;;
--enghelp) echo "Available IO engines:"; printf '\\tpsync\\n\\tmmap\\n' ;;
esac
"""


@pytest.mark.parametrize(
    ("version", "engine", "reason"),
    [
        ("echo fio-3.13", "psync", None),
        ("echo fio-4.0-12-gabcdef", "mmap", None),
        ("echo fio-3.12", "psync", "fio-3.12 is too old"),
        ("echo fio-2.21", "psync", "fio-2.21 is too old"),
        ("true", "psync", "what calls itself fio is too old"),
        ("exit 3", "psync", "exited with status 3"),
        ("echo fio-3.33", "io_uring", "without the engine io_uring"),
    ],
)
def test_whether_it_will_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    engine: str,
    reason: str | None,
) -> None:
    fake = tmp_path / "fio"
    fake.write_text(FAKE.format(version=version))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = Fio(engine).probe()
    assert found is None if reason is None else reason in (found or "")


def test_a_missing_one_has_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Fio("psync").probe() == "it is not on PATH"
    assert "3.13" in Fio("psync").hint
