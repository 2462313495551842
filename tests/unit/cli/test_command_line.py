"""One house style for all commands: what their help looks like, what they can print."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from btrfs_ublk.base.entry import walk_commands
from btrfs_ublk.base.log import log
from btrfs_ublk.cli.main import command as root

COLUMNS = 80
CONTEXTS = {
    context.command_path: context for context in walk_commands(root, "btrfs-ublk")
}
GROUPS = {
    path: context
    for path, context in CONTEXTS.items()
    if isinstance(context.command, click.Group)
}
LEAVES = {path: context for path, context in CONTEXTS.items() if path not in GROUPS}

#: Commands without --json, and why.
NO_JSON = {
    "btrfs-ublk bench matrix": "prints progress only; its file of results is JSON",
    "btrfs-ublk bench report": "prints nothing; it makes a page",
    "btrfs-ublk bench run": "prints nothing but JSON",
    "btrfs-ublk cache limit": "prints nothing",
    "btrfs-ublk cache pin": "prints nothing",
    "btrfs-ublk cache unpin": "prints nothing",
    "btrfs-ublk completion": "prints a script, for a shell",
    "btrfs-ublk daemon serve": "prints nothing; it stays in the foreground",
    "btrfs-ublk image export": "prints a tar",
    "btrfs-ublk image run": "prints nothing but what its command does",
    "btrfs-ublk podman remove": "prints nothing",
    "btrfs-ublk podman setup": "prints lines for another program's file",
    "btrfs-ublk site-cache config": "prints lines for a file of nginx",
    "btrfs-ublk snapshotter config": "prints lines for another program's file",
    "btrfs-ublk snapshotter serve": "prints nothing; it stays in the foreground",
    "btrfs-ublk volume logs": "prints the log as it is",
    "btrfs-ublk device serve": "prints nothing; it stays in the foreground",
}

#: Commands that print what may be long, while they read it.
JSON_LINES = {"btrfs-ublk events", "btrfs-ublk map-physical"}


def help_of(context: click.Context) -> str:
    context.terminal_width = COLUMNS
    return context.command.get_help(context)


@pytest.mark.parametrize("path", CONTEXTS)
def test_help_fits_a_terminal(path: str) -> None:
    lines = help_of(CONTEXTS[path]).splitlines()
    assert [line for line in lines if len(line) > COLUMNS] == []
    assert lines[0].startswith(f"Usage: {path} ")


@pytest.mark.parametrize("path", GROUPS)
def test_lists_have_whole_sentences(path: str) -> None:
    """The first sentence of each command's docstring is what lists show: shorten it
    where this fails.
    """
    _, _, commands = help_of(GROUPS[path]).partition("\nCommands:\n")
    assert commands
    for line in commands.splitlines():
        assert not line.endswith("..."), f"cut: {line}"
        assert line[2] != " ", f"goes on in a second line: {line}"
        assert line.endswith("."), f"no whole sentence: {line}"


@pytest.mark.parametrize("path", CONTEXTS)
def test_all_is_explained(path: str) -> None:
    context = CONTEXTS[path]
    text = context.command.help or ""
    assert text, "no docstring"
    if context.parent is not None:
        text += context.parent.command.help or ""  # "A DEVICE is …", for all of a noun
    for parameter in context.command.params:
        if isinstance(parameter, click.Argument):
            name = parameter.make_metavar(context).replace("...", "").strip("[]")
            assert name in text, f"the help says nothing about {name}"
        elif isinstance(parameter, click.Option):
            assert parameter.help, f"{parameter.opts[-1]} has no help"
            assert parameter.help.strip()[-1] in ".]", f"{parameter.opts[-1]}: no end"


@pytest.mark.parametrize("path", LEAVES)
def test_an_empty_path_is_not_this_directory(path: str) -> None:
    for parameter in LEAVES[path].command.params:
        if isinstance(parameter.type, click.Path):
            with pytest.raises(click.BadParameter, match="the path is empty"):
                parameter.type.convert("", parameter, LEAVES[path])
        else:
            assert parameter.metavar != "PATH", f"{parameter.opts}: use PathType"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "snapshotter status --wait soon",
            "'--wait': 'soon' is not a valid number of s",
        ),
        (
            "snapshotter status --wait nan",
            "'--wait': 'nan' is not a valid number of sec",
        ),
        ("volume up x --deadline 5s", "such as 30 or 0.5"),
        ("volume up x --queues many", "'--queues': 'many' is not a valid whole number"),
        ("top --count 0", "'--count': 0 is not in the range"),
        (
            "snapshotter serve --docker-config /no/c",
            "'--docker-config': File '/no/c' do",
        ),
        (
            "snapshotter serve --ca-file /no/c",
            "'--ca-file': File '/no/c' does not exist",
        ),
        (
            "image inspect r.example/a:1 --ca-file /",
            "'--ca-file': File '/' is a direct",
        ),
        ("seed check /no/s", "File '/no/s' does not exist"),
        ("prefetch x --trace /no/t", "'--trace': File '/no/t' does not exist"),
        (
            "site-cache check http://h:1 --object http://h/x --token-file /no/t",
            "'/no/t'",
        ),
    ],
)
def test_a_wrong_value_is_said_with_its_option(words: str, said: str) -> None:
    done = CliRunner().invoke(root, words.split())
    assert done.exit_code == 2 and said in done.output, done.output


@pytest.mark.parametrize("path", LEAVES)
def test_data_are_there_as_json(path: str) -> None:
    found = [x for x in LEAVES[path].command.params if "--json" in x.opts]
    if path in NO_JSON:
        assert not found, "take it out of NO_JSON"
    else:
        assert found, "add json_option, or to NO_JSON with the reason"
        help_text = getattr(found[0], "help")
        assert ("one object per line" in help_text) is (path in JSON_LINES)


def test_exceptions_are_about_commands_that_there_are() -> None:
    assert NO_JSON.keys() <= LEAVES.keys()


def test_nouns_come_before_verbs() -> None:
    """At most `btrfs-ublk NOUN VERB`, of lower case letters and hyphens."""
    for path in CONTEXTS:
        words = path.split()[1:]
        assert len(words) <= 2, path
        assert all(word.replace("-", "").isalpha() and word.islower() for word in words)


@pytest.mark.parametrize("arguments", [("metrics",), ("top", "--count=1")])
def test_monitors_print_json(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "btrfs_ublk.cli.main", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert isinstance(json.loads(done.stdout), list)


@pytest.mark.parametrize(
    ("alias", "real"),
    [
        *(("volume ls", "list"), ("volume rm", "remove"), ("volume show", "status")),
        *(("volume stop", "down"), ("device ls", "list"), ("device rm", "down")),
        *(("device add", "up"), ("device show", "status"), ("device del", "down")),
        *(("device remove", "down"), ("device stop", "down")),
    ],
)
def test_what_people_try_first_is_an_alias(alias: str, real: str) -> None:
    noun, verb = alias.split()
    result = CliRunner().invoke(root, [noun, verb, "--help"], prog_name="btrfs-ublk")
    assert result.exit_code == 0
    there = CONTEXTS[f"btrfs-ublk {noun} {real}"].command.help
    assert there is not None and there.split("\n")[0] in result.output
    assert f"btrfs-ublk {alias}" not in CONTEXTS  # help does not list it


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("volume list", logging.WARNING),
        ("-v volume list", logging.INFO),
        ("volume -v list", logging.INFO),
        ("volume list -v", logging.INFO),
        ("-v volume list -v", logging.DEBUG),
        ("volume ls -q", logging.ERROR),
    ],
)
def test_verbosity_is_heard_before_and_after_the_command(
    words: str, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", False)
    before = log.level
    try:
        result = CliRunner().invoke(root, [*words.split(), f"--base={tmp_path}"])
        assert result.exit_code == 0, result.output
        assert log.level == level
    finally:
        log.setLevel(before)
