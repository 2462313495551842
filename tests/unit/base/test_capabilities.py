"""What the machine lacks is said with its reason and its hint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from btrfs_ublk.base.capabilities import Helper, require
from btrfs_ublk.base.helpers import HELPERS_VARIABLE, helper_path
from btrfs_ublk.errors import CapabilityError


@dataclass(frozen=True)
class Missing:
    name: str = "time travel"
    hint: str = "wait for a newer kernel"

    def probe(self) -> str | None:
        return "the flux is too low"


def test_a_missing_one_is_named_with_reason_and_cure() -> None:
    with pytest.raises(CapabilityError) as caught:
        require(Missing())
    assert str(caught.value) == (
        "time travel is needed here: the flux is too low\n"
        "  hint: wait for a newer kernel"
    )
    require()


def test_helpers_are_found_and_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HELPERS_VARIABLE, str(tmp_path))
    helper = Helper("btrfs-ublk-mkseed")
    assert "is not at" in (helper.probe() or "") and HELPERS_VARIABLE in helper.hint
    (tmp_path / helper.helper).touch(mode=0o644)
    assert "not executable" in (helper.probe() or "")
    (tmp_path / helper.helper).chmod(0o755)
    assert helper.probe() is None
    assert helper_path(helper.helper) == tmp_path / helper.helper
    monkeypatch.delenv(HELPERS_VARIABLE)
    with pytest.raises(CapabilityError, match="build it: pip install"):
        helper_path("no-such-helper")
