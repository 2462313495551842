"""Words, colours and plots of the report."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.pages import comparison, hostile_comparison, page_of, write_document

from btrfs_ublk.bench.page.build import render
from btrfs_ublk.bench.page.measures import (
    duration,
    quantity,
    told_measure,
    workload_words,
)

pytestmark = pytest.mark.thorough


class TestWords:
    def test_numbers(self) -> None:
        numbers = (0, 0.01234, 0.5, 12.34, 123.4, 12345.6)
        assert [quantity(x) for x in numbers] == [
            *("0", "0.0123", "0.500", "12.3", "123", "12,346")
        ]
        assert [duration(x) for x in (2.5, 0.0125, 8.3e-6)] == [
            *("2.50 s", "12.5 ms", "8.30 µs")
        ]

    @pytest.mark.parametrize(
        ("key", "unit", "title", "text"),
        [
            ("iops", "IOPS", "I/O per second", "12.0 IOPS"),
            ("cold_ms", "ms", "Cold, ms", "12.0 ms"),
            ("ms", "ms", "ms", "12.0 ms"),
            ("written_kib", "KiB", "Written, KiB", "12.0 KiB"),
            ("score", "", "Score", "12.0"),
        ],
    )
    def test_titles_follow_names(
        self, key: str, unit: str, title: str, text: str
    ) -> None:
        measure = told_measure({"name": key, "unit": unit, "better": "less"})
        assert (measure.title, measure.text(12)) == (title, text)

    def test_workloads(self) -> None:
        assert workload_words("randread-uring-d64-j2") == (
            "4 KiB random reads, 64 in flight (io_uring), 2 jobs"
        )
        assert workload_words("K=10 L=100") == "K=10 L=100"


class TestPlots:
    def test_files_are_whole_and_repeat(self, tmp_path: Path) -> None:
        path = write_document(tmp_path / "x.json", hostile_comparison())
        one, other = page_of([path]).plots, page_of([path]).plots
        assert one and len({plot.name for plot in one}) == len(one)
        for first, second in zip(one, other):
            assert first.svg == second.svg
            root = ElementTree.fromstring(first.svg)
            assert root.get("role") == "img" and root.get("width") == "360"
            # A size of its own, and nothing that must be fetched.
            assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", first.svg)
        assert one[0].png() == other[0].png()
        assert one[0].png().startswith(b"\x89PNG\r\n\x1a\n")

    def test_the_page_has_their_colours(self, tmp_path: Path) -> None:
        path = write_document(tmp_path / "x.json", comparison())
        page = page_of([path])
        text = render(page, command="")
        for plot in page.plots:
            roles = set(re.findall(r"var\((--\w+)\)", plot.inline))
            assert not re.search(r"#[0-9a-f]{6}", plot.inline) and roles
            # In the light, and in the dark.
            assert all(text.count(f"{role}:#") == 2 for role in roles)
