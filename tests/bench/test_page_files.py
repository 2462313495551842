"""Which files the report takes, what it refuses, and what it writes."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pages import (
    HOSTILE,
    comparison,
    hostile_comparison,
    matrix_lines,
    page_of,
    write_document,
    write_lines,
)

from btrfs_ublk.bench.commands import report
from btrfs_ublk.bench.page.build import render
from btrfs_ublk.bench.page.inputs import read_inputs
from btrfs_ublk.errors import UsageError

pytestmark = pytest.mark.thorough

Record = dict[str, Any]


ODD_VALUES = (None, True, "", "x", -1, 0, 1e308, float("inf"), [], {}, [{}], {"a": 1})


def change(data: st.DataObject, value: Record) -> None:
    """One value anywhere within becomes an odd one, or is gone."""
    at: Any = value
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        below = at[key]
        if not isinstance(below, dict | list) or not below or data.draw(st.booleans()):
            break
        at = below
    if isinstance(at, dict) and data.draw(st.booleans()):
        del at[key]
    else:
        at[key] = data.draw(st.sampled_from(ODD_VALUES))


class TestInputs:

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda lines: [], "x.jsonl: it is empty"),
            (lambda lines: ["{", *lines], "x.jsonl: line 1 is no JSON"),
            (
                lambda lines: [*lines[:3], lines[3][:40], *lines[4:]],
                "line 4 is no JSON",
            ),
            (lambda lines: [*lines[:3], "[1]", *lines[3:]], "line 4 is no run"),
            (lambda lines: [*lines, '{"kind": "suite"}'], "line 20 is no run"),
            (
                lambda lines: [lines[0].replace('"version": 1', '"version": 9')]
                + lines[1:],
                "line 1 is of version 9, not 1",
            ),
            (
                lambda lines: [lines[0], lines[1].replace("6.99", '6.9"'), *lines[2:]],
                "line 2 is no JSON",
            ),
        ],
    )
    def test_bad_lines_are_named(
        self, tmp_path: Path, change: Callable[[list[str]], list[str]], message: str
    ) -> None:
        lines = [json.dumps(line) for line in matrix_lines(blocks=1)]
        path = tmp_path / "x.jsonl"
        path.write_text("".join(f"{line}\n" for line in change(lines)))
        with pytest.raises(UsageError, match=re.escape(message)):
            read_inputs([path])

    @settings(max_examples=60)
    @given(data=st.data())
    def test_whatever_is_changed_is_shown_or_refused(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        """One value of a document or of a line becomes another: there is a page, or an
        error that names the file.
        """
        path = tmp_path_factory.getbasetemp() / "x.json"
        if data.draw(st.booleans()):
            lines = matrix_lines(blocks=1)[:6]
            change(data, data.draw(st.sampled_from(lines)))
            write_lines(path, lines)
        else:
            made = comparison(peers=("loop", "ublk"), turns=2)
            change(data, made)
            write_document(path, made)
        try:
            text = render(page_of([path]), command="")
        except UsageError as error:
            assert "x.json" in error.message
        else:
            assert text.endswith("</html>\n")


class TestCommand:
    def run(self, *words: object) -> Any:
        return CliRunner().invoke(report.command, [str(word) for word in words])

    def test_nothing_from_a_file_is_code(self, tmp_path: Path) -> None:
        path = tmp_path / f"{HOSTILE.replace('/', '')}.json"
        write_document(path, hostile_comparison())
        page = tmp_path / "made.html"
        assert self.run(path, "-o", page).exit_code == 0
        text = page.read_text()
        assert "<script" not in text and "<img" not in text and "<b>" not in text
        assert "&lt;script&gt;" in text and "\u202e" not in text

    def test_a_bad_file_leaves_what_was_there(self, tmp_path: Path) -> None:
        good = write_document(tmp_path / "good.json", comparison(turns=1))
        bad = tmp_path / "bad.json"
        bad.write_text("{}")
        page = tmp_path / "made.html"
        page.write_text("before")
        done = self.run(good, bad, "-o", page)
        assert isinstance(done.exception, UsageError)
        assert f"{bad}: line 1 is no run" in str(done.exception)
        assert page.read_text() == "before"

    def test_results_are_not_overwritten(self, tmp_path: Path) -> None:
        path = write_document(tmp_path / "x.json", comparison(turns=1))
        (tmp_path / "link").symlink_to(path)
        done = self.run(path, "-o", tmp_path / "link")
        assert isinstance(done.exception, UsageError)
        assert "would be overwritten" in str(done.exception)
        done = self.run(path, "-o", tmp_path / "no" / "page.html")
        assert "there is no directory" in str(done.exception)
