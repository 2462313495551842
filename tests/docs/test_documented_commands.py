"""Every command that a document tells of makes sense, and is executed by some test."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from support.devices import remove_all
from support.documented_commands import ELSEWHERE, REPLAYED, SCENARIOS
from support.documents import (
    CONTEXTS,
    PROGRAM,
    Parsed,
    WrongLine,
    commands_in,
    documents,
    lines_of,
    parse,
)
from support.needs import Need
from support.paths import PROJECT

from btrfs_ublk.base.capabilities import ROOT
from btrfs_ublk.volume.store import VOLUMES_VARIABLE

_TABLE = "tests/support/documented_commands.py"
_LINES = [line for document in documents() for line in lines_of(document)]
_TIMEOUT_S = 200
_DEVICES = (pytest.mark.device, pytest.mark.fuse)


def _parsed(words: tuple[str, ...]) -> Parsed | None:
    try:
        return parse(words)
    except WrongLine:
        return None  # that is another test's


def _is_replayed(document: str) -> bool:
    return any(fnmatch(document, pattern) for pattern in REPLAYED)


def _executed() -> list[Parsed]:
    """What some test executes."""
    found = [
        _parsed(words)
        for scenario in SCENARIOS.values()
        for _, line in scenario.commands
        for words in commands_in(line)
    ]
    found += [
        _parsed(line.words)
        for line in _LINES
        if line.replayed and _is_replayed(line.document)
    ]
    # Options of ELSEWHERE have no values, and commands there no arguments.
    found += [
        Parsed(
            " ".join(x for x in command.split() if not x.startswith("-")),
            frozenset(x for x in command.split() if x.startswith("-")),
        )
        for command in ELSEWHERE
    ]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_commands_are_as_the_program_has_them(document: Path) -> None:
    wrong = []
    for line in lines_of(document):
        try:
            parse(line.words)
        except WrongLine as error:
            wrong.append(f"{line.place}\n  {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_commands_in_sentences_are_known(document: Path) -> None:
    """`btrfs-ublk NOUN VERB …` between backticks: that there are such."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    for text in re.findall(rf"`{PROGRAM} ([^`]+)`", prose):
        if "\\n" in text:
            continue  # that is what a file begins with
        words = re.match(r"[a-z -]*", text.replace("\n", " "))
        assert words is not None
        path = PROGRAM
        for word in words[0].split():
            if word.startswith("-") or f"{path} {word}" not in CONTEXTS:
                break
            path = f"{path} {word}"
        known = path != PROGRAM or not words[0].strip() or text.startswith("-")
        assert known, f"{document.name}: there is no `{PROGRAM} {text}`"


def test_every_documented_command_is_executed() -> None:
    executed = _executed()
    missing = [
        f"{line.place}\n  as: {parsed}"
        for line in _LINES
        if (parsed := _parsed(line.words)) is not None
        and not any(each.covers(parsed) for each in executed)
    ]
    assert not missing, (
        f"no test executes these; {_TABLE} says, at its top, how to have that:\n"
        + "\n".join(missing)
    )


def test_sessions_are_replayed() -> None:
    """A block of ``console`` shows what is printed: a test has to hold it to that."""
    loose = {x.document for x in _LINES if x.replayed and not _is_replayed(x.document)}
    assert not loose, f"in no pattern of REPLAYED in {_TABLE}: {sorted(loose)}"


@pytest.mark.parametrize("where", sorted({*ELSEWHERE.values(), *REPLAYED.values()}))
def test_what_executes_it_exists(where: str) -> None:
    name, *parts = where.split("::")
    path = PROJECT / name
    if where in REPLAYED.values() and not any(x.replayed for x in _LINES):
        pytest.skip("does not apply: no document has a session yet")
    assert path.is_file(), f"{_TABLE} names {where}, which does not exist"
    if not parts:
        scripts = [key.split()[0] for key, value in ELSEWHERE.items() if value == name]
        assert all(script in path.read_text() for script in scripts)
        return
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in parts:
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
        ]
        assert found, f"{_TABLE} names {where}, but there is no {part} in {name}"
        body = found[0].body


@pytest.fixture
def nothing_of_a_failure(
    sparse_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Volumes of their own, and no device of a scenario that went wrong."""
    monkeypatch.setenv(VOLUMES_VARIABLE, str(sparse_path / "volumes"))
    monkeypatch.setenv("PROJECT", str(PROJECT))
    monkeypatch.setenv(
        "PATH", f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    )
    yield
    mount = sparse_path / "work" / "mnt"
    if mount.is_mount():
        subprocess.run(["umount", mount], check=False, timeout=60)
    remove_all()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=_DEVICES if ROOT in scenario.needs else ())
        for name, scenario in SCENARIOS.items()
    ],
)
def test_scenario(
    name: str, sparse_path: Path, need: Need, nothing_of_a_failure: None
) -> None:
    scenario = SCENARIOS[name]
    need(*scenario.needs)
    directory = sparse_path / "work"
    directory.mkdir()
    for status, command in scenario.commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        assert done.returncode == status, f"{command}\n{done.stdout}{done.stderr}"
