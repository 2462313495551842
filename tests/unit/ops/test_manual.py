"""Man pages and reference, made of the commands' help."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.needs import Need
from support.paths import PROJECT

from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.ops.manual import SETTINGS_COMMAND, man_pages, with_settings
from btrfs_ublk.volume import SETTINGS

_PAGES = man_pages(date="2026-01-02")
GROFF = Program("groff", "groff")


def test_the_table_of_settings_is_current() -> None:
    written = (PROJECT / "docs" / "volumes.md").read_text()
    assert written == with_settings(written), f"run {SETTINGS_COMMAND}, and commit it"
    found = re.findall(r"^\| `(\w+)` \| `--([a-z-]+)` \|", written, re.M)
    assert [key for key, _ in found] == [
        key for key in SETTINGS if key not in ("file", "tree")
    ]
    assert all(option == key.replace("_", "-") for key, option in found)


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
