"""What docs/how-to/pytest-fixtures.md shows is a project whose tests pass."""

import re

import pytest
from support.needs import Need
from support.paths import PROJECT

from btrfs_ublk.base.capabilities import BTRFS_PROGS, FUSE, UBLK
from btrfs_ublk.testing.settings import REQUIRE_VARIABLE

pytest_plugins = "pytester"

_DOCUMENT = PROJECT / "docs" / "how-to" / "pytest-fixtures.md"
_FILE = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", re.M | re.S)


@pytest.mark.device
def test_examples_pass(
    pytester: pytest.Pytester, need: Need, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(FUSE, BTRFS_PROGS)
    monkeypatch.delenv(REQUIRE_VARIABLE, raising=False)
    for name, text in _FILE.findall(_DOCUMENT.read_text(encoding="utf-8")):
        (pytester.path / name).write_text(text, encoding="utf-8")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=120)
    no_ublk = int(UBLK.probe() is not None)
    result.assert_outcomes(passed=9 - no_ublk, skipped=no_ublk)


def test_it_names_all_settings(pytester: pytest.Pytester) -> None:
    text = _DOCUMENT.read_text(encoding="utf-8")
    helped = str(pytester.runpytest_inprocess("--help").stdout)
    names = set(re.findall(r"--btrfs-ublk-[a-z-]+|\bbtrfs_ublk_[a-z_]+(?= \()", helped))
    assert len(names) == 8
    assert [name for name in names if f"`{name}" not in text] == []
