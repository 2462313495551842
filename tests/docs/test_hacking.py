"""The worked examples of HACKING.md are code that compiles, and that runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from support.paths import PROJECT

from btrfs_ublk.bench.content import STAMPS
from btrfs_ublk.bench.peer import all_peers, setting
from btrfs_ublk.bench.suite import parse_suite

_TEXT = (PROJECT / "HACKING.md").read_text()


def _examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", _TEXT, re.M | re.S)


def _run_module(name: str) -> ModuleType:
    (source,) = [text for text in _examples("python") if name in text.splitlines()[0]]
    module = ModuleType("example")
    exec(compile(source, name, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("source", _examples("c"), ids=lambda text: text.split()[1])
def test_c_example_compiles(source: str, tmp_path: Path) -> None:
    path = tmp_path / "example.c"
    path.write_text(source)
    flags = subprocess.run(
        ["pkg-config", "--cflags", "jansson"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    command = ["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
    result = subprocess.run(
        [
            *command,
            "-fsyntax-only",
            f"-I{PROJECT / 'csrc'}",
            *shlex.split(flags),
            path,
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


def test_peer_example_serves_what_it_says(tmp_path: Path) -> None:
    (peer,) = _run_module("peers/hard_link.py").PEERS
    with setting(tmp_path, size_bytes=1 << 16) as made, peer.serving(made) as subject:
        assert subject.path.read_bytes() == STAMPS.content(0, 1 << 16)


def test_suite_example_names_peers_that_there_are() -> None:
    (text,) = _examples("toml")
    (comparison,) = parse_suite(text).comparisons_of({})
    assert set(comparison.peers) <= set(all_peers())
    assert [bar.ratio for bar in comparison.bars] == [0.5]


def test_study_example_measures_and_makes_a_table(tmp_path: Path) -> None:
    module = _run_module("bench/processes.py")
    words = ["--repeats", "2", "--json", "--parent", str(tmp_path)]
    done = CliRunner().invoke(module.command, words)
    (table,) = module.tables(json.loads(done.stdout))
    assert [row[:2] for row in table.rows] == [("listdir", "2")]


def test_every_file_that_it_names_exists() -> None:
    new = {"counter.c", "checker.c", "hard_link.py", "disks.toml"}
    prose = re.sub(r"^```.*?^```$", "", _TEXT, flags=re.M | re.S)
    named = set(
        re.findall(r"`((?:csrc|btrfs_ublk|tests|docs|scripts)/[\w/.-]+)`", prose)
    )
    missing = {
        name
        for name in named
        if not (PROJECT / name).exists() and Path(name).name not in new
    }
    assert not missing
