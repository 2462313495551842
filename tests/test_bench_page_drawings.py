"""Words, letters, colours and drawings of the report."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_support import comparison, hostile_comparison, page_of, write_document

from btrfs_ublk.bench.page import palette
from btrfs_ublk.bench.page.build import build
from btrfs_ublk.bench.page.inputs import clean, read_inputs
from btrfs_ublk.bench.page.measures import (
    duration,
    measure_named,
    quantity,
)
from btrfs_ublk.bench.page.sheet import PLAIN, log_ticks, settings, text_width, wrapped
from btrfs_ublk.bench.page.words import split_jobs, workload_words


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
        ("key", "value", "text", "more"),
        [
            ("iops", 12345.0, "12,345 IOPS", True),
            ("wall_s", 0.5, "500 ms", False),
            ("seconds", 1.5, "1.50 s", False),
            ("peak_bytes", 1 << 20, "1 MiB", False),
            ("bytes_per_s", 1 << 30, "1 GiB/s", True),
            ("cold_ms", 12.0, "12.0 ms", False),
            ("ms", 0.5, "0.500 ms", False),
            ("written_kib", 82.0, "82.0 KiB", False),
            ("score", 3.0, "3.00", True),
        ],
    )
    def test_units_follow_names(
        self, key: str, value: float, text: str, more: bool
    ) -> None:
        measure = measure_named(key)
        assert (measure.text(value), measure.more_is_better) == (text, more)

    def test_workloads(self) -> None:
        assert workload_words("randread-uring-d64-j2") == (
            "4 KiB random reads, 64 in flight (io_uring), 2 jobs"
        )
        assert workload_words("K=10 L=100") == "K=10 L=100"
        assert split_jobs("randread-psync-j12") == ("randread-psync", 12)
        assert split_jobs("randread-psync") == ("randread-psync", 1)

    @given(st.text(max_size=80), st.floats(40, 300))
    def test_lines_are_no_wider_than_asked(self, text: str, width: float) -> None:
        with settings():
            lines = wrapped(clean(text), PLAIN, width)
            assert "".join("".join(lines).split()) == "".join(clean(text).split())
            for line in lines:
                assert len(line) <= 1 or text_width(line, PLAIN) <= width

    @given(st.floats(1e-4, 1e4), st.floats(1.3, 1e6))
    def test_ticks_keep_their_distance(self, low: float, factor: float) -> None:
        high = low * factor
        ticks = log_ticks(low, high, 320)
        assert all(low <= tick <= high for tick in ticks)
        for one, other in zip(ticks, ticks[1:]):
            assert math.log(other / one) / math.log(factor) * 320 >= 40


class TestPalette:
    @pytest.mark.parametrize("mode", [0, 1])
    def test_contrast(self, mode: int) -> None:
        """WCAG 2.1: 4.5 for text, 3 for what is no text."""
        ground = luminance(palette.BACKGROUND[mode])
        for name, shade in palette.ROLES.items():
            least = {"bg": 0.0, "grid": 0.0, "text": 4.5, "muted": 4.5, "ours": 4.5}
            one, other = sorted((ground, luminance(shade[mode])))
            contrast = (other + 0.05) / (one + 0.05)
            assert contrast >= least.get(name, 3.0), (name, contrast)

    @pytest.mark.parametrize("mode", [0, 1])
    @pytest.mark.parametrize("kind", ["usual", *"pd"])
    def test_series_are_told_apart(self, mode: int, kind: str) -> None:
        """The shapes of their points differ besides."""
        seen = [simulated(shade[mode], kind) for shade in palette.SERIES]
        for number, one in enumerate(seen):
            for other in seen[:number]:
                assert math.dist(one, other) > 0.13, (number, kind)
        assert len(set(palette.MARKERS)) >= len(palette.SERIES)


def linear(color: str) -> tuple[float, float, float]:
    def part(at: int) -> float:
        share = int(color[at : at + 2], 16) / 255
        return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4

    return part(1), part(3), part(5)


def luminance(color: str) -> float:
    red, green, blue = linear(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


#: Machado, Oliveira and Fernandes (2009), at full severity: protanopia, deuteranopia.
_BLINDNESS = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "p": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "d": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}


def simulated(color: str, kind: str) -> tuple[float, ...]:
    """In Oklab, as somebody sees it."""
    rgb = [
        max(0.0, sum(a * b for a, b in zip(row, linear(color))))
        for row in _BLINDNESS[kind]
    ]
    to_lms = (
        (0.4122214708, 0.5363325363, 0.0514459929),
        (0.2119034982, 0.6806995451, 0.1073969566),
        (0.0883024619, 0.2817188376, 0.6299787005),
    )
    lms = [sum(a * b for a, b in zip(row, rgb)) ** (1 / 3) for row in to_lms]
    to_lab = (
        (0.2104542553, 0.7936177850, -0.0040720468),
        (1.9779984951, -2.4285922050, 0.4505937099),
        (0.0259040371, 0.7827717662, -0.8086757660),
    )
    return tuple(sum(a * b for a, b in zip(row, lms)) for row in to_lab)


class TestPictures:
    def test_files_are_whole_and_repeat(self, tmp_path: Path) -> None:
        path = write_document(tmp_path / "x.json", hostile_comparison())
        one, other = (build(read_inputs([path]), png=True) for _ in range(2))
        assert one.pictures and len({x.name for x in one.pictures}) == len(one.pictures)
        for first, second in zip(one.pictures, other.pictures):
            assert first == second
            root = ElementTree.fromstring(first.standalone)
            assert root.get("role") == "img" and root.get("width") == "360"
            # A size of its own, and nothing that must be fetched.
            assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", first.standalone)
            assert first.png and first.png.startswith(b"\x89PNG\r\n\x1a\n")

    def test_colours_are_classes(self, tmp_path: Path) -> None:
        path = write_document(tmp_path / "x.json", comparison())
        for picture in page_of([path]).pictures:
            assert not re.search(r"#[0-9a-f]{6}", picture.inline)
            assert "prefers-color-scheme" in picture.standalone
