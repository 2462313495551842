"""What the machine lacks is said with its reason and its hint."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from btrfs_ublk.base import capabilities
from btrfs_ublk.base.capabilities import (
    Helper,
    PythonPackage,
    SparseFile,
    require,
    sparse_directory,
)
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


@pytest.mark.parametrize("managed", [True, False])
def test_python_packages(
    managed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip refuses to install for a Python that a distribution manages."""
    package = PythonPackage("Jinja2", setup="--bench")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert package.hint == "run scripts/setup --bench"
    monkeypatch.setattr(capabilities, "checkout", lambda: None)
    assert package.hint == f"run {sys.executable} -m pip install Jinja2"
    monkeypatch.setattr("sys.prefix", sys.base_prefix)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    if managed:
        (tmp_path / "EXTERNALLY-MANAGED").touch()
    assert ("install the package python3-jinja2" == package.hint) is managed
    assert ("pip install Jinja2" in package.hint) is not managed


def test_python_packages_that_are_called_otherwise() -> None:
    assert PythonPackage("pytest-timeout", "pytest_timeout").probe() is None
    absent = PythonPackage("nothing", "no_such_package.nothing").probe()
    assert absent == "this Python does not have it"


def test_where_sparse_files_fit(sparse_path: Path) -> None:
    assert SparseFile(sparse_path, 4 << 60).probe() is None
    assert SparseFile(Path("/no-such-directory"), 1).probe() is not None
    assert sparse_directory(4 << 60, candidates=["/no", sparse_path]) == sparse_path
    with pytest.raises(CapabilityError, match="/no: .* /none: "):
        sparse_directory(1, candidates=["/no", "/none"])


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
