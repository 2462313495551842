"""Man pages and reference, made of the commands' help."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.needs import Need
from support.paths import PROJECT

from btrfs_ublk import api
from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.cli.main import command as root
from btrfs_ublk.ops.manual import SETTINGS_COMMAND, man_pages, with_settings
from btrfs_ublk.volume import SETTINGS

_PAGES = man_pages(date="2026-01-02")
GROFF = Program("groff", "groff")


def test_the_table_of_settings_is_current() -> None:
    written = (PROJECT / "docs" / "volumes.md").read_text()
    assert written == with_settings(written), f"run {SETTINGS_COMMAND}, and commit it"
    found = re.findall(r"^\| `(\w+)` \| `--([a-z-]+)` \|", written, re.M)
    assert [key for key, _ in found] == [key for key in SETTINGS if key != "file"]
    assert all(option == key.replace("_", "-") for key, option in found)


def test_pydoc_tells_of_the_whole_python_api() -> None:
    """Documents name it as the reference."""
    text = subprocess.run(
        [sys.executable, "-m", "pydoc", "btrfs_ublk.api"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    missing = [name for name in api.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing
    assert "parse_size(text: 'str', *, what: 'str' = 'size') -> 'int'" in text


def test_every_noun_has_a_page() -> None:
    nouns = root.list_commands(click.Context(root))
    expected = {f"btrfs-ublk-{noun}.1" for noun in nouns}
    assert set(_PAGES) == expected | {"btrfs-ublk.1"}
    assert {"btrfs-ublk-seed.1", "btrfs-ublk-map-physical.1"} < set(_PAGES)


@pytest.mark.parametrize("name", _PAGES)
def test_page_is_valid(name: str, tmp_path: Path, need: Need) -> None:
    path = tmp_path / name
    path.write_text(_PAGES[name])
    if shutil.which("mandoc"):
        done = subprocess.run(
            ["mandoc", "-T", "lint", "-W", "warning", path],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout + done.stderr == ""
    need(GROFF)
    shown = subprocess.run(
        ["groff", "-ww", "-man", "-Tutf8", "-P-cbou", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stderr == ""
    words = " ".join(shown.stdout.replace("-\n", "-").split())
    assert "\\[" not in words
    for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "EXIT STATUS", "SEE ALSO"):
        assert heading in words


def test_pages_are_written(tmp_path: Path) -> None:
    directory = tmp_path / "share" / "man1"
    subprocess.run(
        [sys.executable, "-m", "btrfs_ublk.ops.manual", "man", directory],
        check=True,
        env=os.environ | {"SOURCE_DATE_EPOCH": "1767312000"},
        timeout=60,
    )
    written = {path.name: path.read_text() for path in directory.iterdir()}
    assert written == _PAGES
