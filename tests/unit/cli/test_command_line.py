"""One house style for all commands: what their help looks like, what they can print."""

import click
import pytest
from click.testing import CliRunner

from btrfs_ublk.base.entry import walk_commands
from btrfs_ublk.cli.main import command as root

CONTEXTS = {
    context.command_path: context for context in walk_commands(root, "btrfs-ublk")
}
GROUPS = {
    path: context
    for path, context in CONTEXTS.items()
    if isinstance(context.command, click.Group)
}
LEAVES = {path: context for path, context in CONTEXTS.items() if path not in GROUPS}


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
        ("volume up x --queues many", "'--queues': 'many' is not a valid whole number"),
        ("prefetch x --concurrency 0", "'--concurrency': 0 is not in the range"),
        (
            "snapshotter serve --docker-config /no/c",
            "'--docker-config': File '/no/c' do",
        ),
        ("prefetch x --trace /no/t", "'--trace': File '/no/t' does not exist"),
    ],
)
def test_a_wrong_value_is_said_with_its_option(words: str, said: str) -> None:
    done = CliRunner().invoke(root, words.split())
    assert done.exit_code == 2 and said in done.output, done.output


@pytest.mark.parametrize("path", ["btrfs-ublk volume up", "btrfs-ublk device up"])
def test_units_of_earlier_versions_may_give_an_option_that_is_gone(path: str) -> None:
    context = LEAVES[path]
    context.command.make_parser(context).parse_args(["--realtime"])  # not refused
    assert "--realtime" not in context.command.get_help(context)
