"""What the page begins with: who is better, and where that is said."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.pages import page_of, record, write_document

from btrfs_ublk.bench.page.build import render
from btrfs_ublk.bench.page.charts import Chart, Line

Record = dict[str, Any]


def starts(seconds: dict[str, list[float]]) -> Record:
    """A document of starts of images, with one value for each turn."""
    results = [
        {
            "subject": subject,
            "what": "to the end of the command",
            "far": "20 ms, 100 Mbit/s",
            "run": "one",
            "turn": turn,
            "seconds": value,
            "bytes": 1_000_000,
            "load": 0.1,
        }
        for subject, values in seconds.items()
        for turn, value in enumerate(values)
    ]
    environment = record()
    return {
        "version": 1,
        "benchmark": "image_start",
        "environment": environment,
        "results": results,
        "tables": [],
    }


@pytest.mark.parametrize(
    ("seconds", "heading", "told"),
    [
        (
            {"stargz": [1.0, 1.1, 1.2], "traced image, API": [2.0, 2.2, 2.4]},
            "Where others are better",
            r"stargz <b>1.10 s</b>.*ours, traced, API <b>2.20 s</b>.*2.00 ×",
        ),
        (
            {"stargz": [3.0, 3.3, 3.6], "image, API": [1.0, 1.1, 1.2]},
            "Where btrfs-ublk is better",
            r"ours, API <b>1.10 s</b>.*stargz <b>3.30 s</b>.*3.00 ×",
        ),
        (
            {"stargz": [1.0, 2.0, 3.0], "traced image, API": [3.0, 2.0, 1.1]},
            "Where the turns show no difference",
            r"1.00 ×",
        ),
    ],
)
def test_the_better_one_is_named(
    tmp_path: Path, seconds: dict[str, list[float]], heading: str, told: str
) -> None:
    page = page_of([write_document(tmp_path / "x.json", starts(seconds))])
    text = render(page, command="")
    begin = text.index(f"<h3>{heading}</h3>")
    said = text[begin : text.index("</ul>", begin)]
    assert re.search(rf"Start of an image, .*\n?.*{told}", said), said


def test_what_says_nothing_is_left_out(tmp_path: Path) -> None:
    """One turn has no interval, and ours alone are beside nobody."""
    one = {"stargz": [1.0], "traced image, API": [2.0]}
    page = page_of([write_document(tmp_path / "x.json", starts(one))])
    assert not page.winners & {"peer", "ours", "even"}
    alone = page_of([write_document(tmp_path / "x.json", starts({"ours": [1.0, 2.0]}))])
    assert not alone.questions


def test_links_of_the_page_lead_somewhere(tmp_path: Path) -> None:
    seconds = {"stargz": [1.0, 1.1], "traced image, API": [2.0, 2.2]}
    paths = [
        write_document(tmp_path / name, starts(seconds))
        for name in ("x.json", "y.json")
    ]
    text = render(page_of(paths), command="")
    names = re.findall(r'\bid="([^"]*)"', text)
    assert len(names) == len(set(names))
    assert set(re.findall(r'href="#([^"]*)"', text)) <= set(names)


@pytest.mark.parametrize(
    ("most", "texts"),
    [
        (1.0, ["0", "0.5", "1"]),
        (9.6, ["0", "2.5", "5", "7.5"]),
        (30_000.0, ["0", "10,000", "20,000", "30,000"]),
        (0.0, ["0", "0.25", "0.5", "0.75", "1"]),
    ],
)
def test_ticks_are_round(most: float, texts: list[str]) -> None:
    line = Line("one", [most], False, most, (most, most), "")
    chart = Chart("", "", [line])
    assert [text for _, text in chart.ticks] == texts
    assert all(0 <= place <= 100 for place, _ in chart.ticks)
