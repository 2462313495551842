"""The report's page as a browser shows it: narrow and wide, light and dark, printed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.needs import Need, inapplicable
from support.pages import (
    CHROMIUM,
    Browser,
    browser,
    bytes_comparison,
    comparison,
    hostile_comparison,
    matrix_lines,
    record,
    write_document,
    write_lines,
)
from support.paths import PROJECT, TESTS

from btrfs_ublk.bench.commands.report import command
from btrfs_ublk.bench.resources.kernel_module import IN_VM_VARIABLE

pytestmark = pytest.mark.thorough

RESULTS = PROJECT / "benchmark_matrix_results"
PROBE = (TESTS / "support/page_probe.js").read_text()
WIDTHS = (360, 800, 1400)
#: What page_probe.js finds nothing of on a good page.
FAULTS = (
    *("outside", "touching", "pale", "cut", "wide", "twice", "dangling"),
    *("skipped_levels", "nameless", "scripts"),
)
#: In CSS pixels, of letters in plots on the narrowest screen.
LEAST_LETTERS = 9.0


@pytest.fixture(scope="module")
def shown(need: Need, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if os.environ.get(IN_VM_VARIABLE) == "1":
        inapplicable("a page looks the same on any kernel")
    need(CHROMIUM)
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with all there can be, and names that are as bad as can be."""
    directory = tmp_path_factory.mktemp("page")
    fuse = ("btrfs-loop", "btrfs-zram", "fuse-clone")
    workloads = ("randread-psync", "randread-psync-j2", "randread-psync-j12")
    tcg = record(guest="tcg")
    return page(
        directory,
        write_document(
            directory / "compare.json",
            comparison(
                peers=fuse, workloads=workloads, factors={"btrfs-zram": 40.0}, turns=30
            ),
        ),
        write_document(
            directory / "busy.json", comparison(other_cores=1.0, environment=tcg)
        ),
        write_document(directory / "hostile.json", hostile_comparison()),
        write_document(directory / "units.json", bytes_comparison()),
        write_document(
            directory / "many.json",
            comparison(workloads=tuple(f"seqread-4k-j{n}" for n in range(1, 9))),
        ),
        write_lines(directory / "full.jsonl", matrix_lines("full", blocks=2)),
        write_lines(
            directory / "quick.jsonl",
            matrix_lines("quick", environment=record(guest="icount"), keep=0.8),
        ),
        write_document(directory / "one.json", comparison(turns=1)),
    )


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all results that there are."""
    directory = tmp_path_factory.mktemp("page")
    return page(directory, *sorted(RESULTS.glob("*/*.json*")))


def page(directory: Path, *paths: Path) -> Path:
    output = directory / "report.html"
    words = [*map(str, paths), "-o", str(output)]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output + repr(done.exception)
    return output


def faults(browser: Browser, path: Path, *, width: int, dark: bool) -> dict[str, Any]:
    browser.open(path, width=width, dark=dark)
    found: dict[str, Any] = browser.evaluate(PROBE)
    wrong = {name: found[name] for name in FAULTS if found[name]}
    if found["scrolls"] > 0:
        wrong["scrolls"] = found["scrolls"]
    if found["smallest_text"] < LEAST_LETTERS:
        wrong["smallest_text"] = found["smallest_text"]
    assert found["plots"] > 0
    assert (found["background"] == "rgb(20, 24, 29)") == dark
    return wrong


@pytest.mark.parametrize(
    ("width", "dark"),
    [*((width, False) for width in WIDTHS), (800, True)],  # dark differs in colors only
    ids=[*(f"{width}-light" for width in WIDTHS), "800-dark"],
)
@pytest.mark.parametrize("which", ["made_up", "committed"])
def test_nothing_overlaps_or_is_cut(
    shown: Browser,
    request: pytest.FixtureRequest,
    which: str,
    width: int,
    dark: bool,
) -> None:
    """And no sideways scrolling, enough contrast, names for all plots and tables."""
    path: Path = request.getfixturevalue(which)
    assert faults(shown, path, width=width, dark=dark) == {}


def test_it_needs_nothing_else_and_runs_nothing(shown: Browser, made_up: Path) -> None:
    shown.requests.clear()
    shown.complaints.clear()
    shown.open(made_up, width=800)
    assert shown.requests == [made_up.as_uri()]
    assert shown.complaints == []
    assert "<script>alert('peer')</script>" in shown.evaluate("document.body.innerText")


def test_it_prints(shown: Browser, made_up: Path) -> None:
    shown.open(made_up, width=1400, dark=True)
    content = shown.pdf()
    assert content.startswith(b"%PDF-") and content.count(b"/Type /Page\n") > 3


def test_pictures_by_themselves(shown: Browser, tmp_path: Path) -> None:
    """In the light, whatever the screen is: they bring their own background."""
    path = write_document(tmp_path / "x.json", comparison(turns=3))
    plots = tmp_path / "plots"
    words = [str(path), "-o", str(tmp_path / "x.html"), "--plots", str(plots)]
    assert CliRunner().invoke(command, words).exit_code == 0
    shown.open(sorted(plots.glob("*.svg"))[0], width=800, dark=True)
    fill = "getComputedStyle(document.querySelector('{}')).fill"
    colors = [shown.evaluate(fill.format(each)) for each in ("path", "text")]
    assert colors == ["rgb(255, 255, 255)", "rgb(87, 96, 106)"]


class TestProbe:
    """What it is to find is found."""

    @pytest.mark.parametrize(
        ("fault", "body"),
        [
            ("scrolls", '<p style="width:900px">wide</p>'),
            ("wide", '<p style="width:900px">wide</p>'),
            (
                "cut",
                '<p style="width:50px;white-space:nowrap">much too long a line</p>',
            ),
            ("touching", '<p>one</p><p style="margin-top:-30px">two</p>'),
            ("pale", '<p style="color:#aaa">pale</p>'),
            ("twice", '<p id="a">x</p><p id="a">y</p>'),
            ("dangling", '<a href="#nowhere">x</a>'),
            ("skipped_levels", "<h1>x</h1><h3>y</h3>"),
            ("nameless", "<table><tr><th>x</th></tr></table>"),
            ("scripts", '<p onclick="x()">x</p>'),
            (
                "touching",
                '<svg class="plot" viewBox="0 0 99 99"><title>t</title><desc>d</desc>'
                '<text x="9" y="50">one</text><text x="12" y="50">two</text></svg>',
            ),
            (
                "outside",
                '<svg class="plot" viewBox="0 0 99 99"><title>t</title><desc>d</desc>'
                '<text x="90" y="50">longer</text></svg>',
            ),
            (
                "pale",
                '<svg class="plot" viewBox="0 0 99 99"><title>t</title><desc>d</desc>'
                '<text x="9" y="50" style="fill:#ddd">one</text></svg>',
            ),
        ],
    )
    def test_faults(
        self, shown: Browser, tmp_path: Path, fault: str, body: str
    ) -> None:
        path = tmp_path / "x.html"
        style = "body{margin:9px}svg{width:300px}p{margin:9px}"
        narrow = '<meta name="viewport" content="width=device-width">'
        path.write_text(f"<!DOCTYPE html>{narrow}<style>{style}</style>{body}")
        shown.open(path, width=360)
        found = shown.evaluate(PROBE)
        assert found[fault], json.dumps(found)
