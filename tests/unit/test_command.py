"""The program: which command lines the daemon answers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from btrfs_ublk.command import request_of


def fork(**more: str) -> dict[str, str]:
    return {"request": "fork", "volume": "app", "fork": "one", "output": "text"} | more


@pytest.mark.parametrize(
    ("words", "request_"),
    [
        ("volume list", {"request": "list", "output": "text"}),
        ("volume list --json", {"request": "list", "output": "json"}),
        (
            "volume status --json app",
            {"request": "status", "volume": "app", "output": "json"},
        ),
        ("image fork app one", fork()),
        ("image fork --mode snapshot app one", fork(mode="snapshot")),
        ("image forks app", {"request": "forks", "volume": "app", "output": "text"}),
        *(
            (words, None)
            for words in (
                "",
                "volume",
                "volume list app",
                "volume list --help",
                "volume -v list",
                "volume status",
                "image fork app",
                "image fork app one --mode none",
                "image fork app one --mode",
                "image fork app one --quota 1M",
                "image fork app -- one",
                "image fork app ö",
                "image unfork app one",
            )
        ),
    ],
)
def test_forms(words: str, request_: dict[str, Any] | None) -> None:
    assert request_of(words.split()) == request_


def test_without_a_daemon_commands_look_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BTRFS_UBLK_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("BTRFS_UBLK_VOLUMES_DIR", str(tmp_path / "volumes"))
    for words, status in (["volume", "list"], 0), (["volume", "status", "none"], 2):
        said = [
            subprocess.run(
                [sys.executable, "-m", f"btrfs_ublk.{module}", *words],
                capture_output=True,
                timeout=60,
            )
            for module in ("command", "cli.main")
        ]
        assert {each.returncode for each in said} == {status}
        assert said[0].stdout == said[1].stdout and said[0].stderr == said[1].stderr
