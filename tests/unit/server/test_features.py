"""What the kernel offers: the server's table, the command, options that insist."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from btrfs_ublk.base.capabilities import UBLK
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.server.features import parse_features


def run_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helper_path(SERVER), *arguments], capture_output=True, text=True, timeout=60
    )


def test_every_feature_has_a_reason_and_is_told_once() -> None:
    done = run_server("--features")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    ublk, fuse = parse_features(json.loads(line))
    assert (ublk.front_end, fuse.front_end) == ("ublk", "fuse")
    assert ublk.available == (UBLK.probe() is None)
    for about in (ublk, fuse):
        names = [feature.name for feature in about.features]
        assert len(set(names)) == len(names) >= 5
        for feature in about.features:
            assert feature.reason and feature.used in ("always", "asked", "never")
            assert about.available or not feature.offered
        assert about.available or (about.reason and about.hint)


@pytest.mark.parametrize("document", [{"ublk": {}}, {"ublk": 1}, {"ublk": None}])
def test_what_makes_no_sense_is_an_error(document: dict[str, Any]) -> None:
    with pytest.raises(BtrfsUblkError):
        parse_features(document)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--feature", "warp"], "there is no feature 'warp'"),
        (["--feature", "batch-io"], "cannot be switched: takes from single requests"),
        (["--no-feature", "user-recovery"], "cannot be switched: --recovery"),
        (
            ["--unprivileged", "--feature", "auto-buf-reg", "x.json"],
            "have no auto-buf-reg",
        ),
        (["--features", "x.json"], "--features takes no description"),
    ],
)
def test_what_cannot_be_switched_is_wrong_usage(
    arguments: list[str], message: str
) -> None:
    done = run_server(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
