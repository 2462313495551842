"""``btrfs-ublk completion``"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_PROGRAM = "btrfs-ublk"
_VARIABLE = "_BTRFS_UBLK_COMPLETE"  # click's variable for completion requests


@click.command(
    "completion",
    epilog="\b\nFor this shell, and in ~/.bashrc for later ones:\n"
    '  eval "$(btrfs-ublk completion bash)"\n'
    "fish, once for all:\n"
    "  btrfs-ublk completion fish > ~/.config/fish/completions/btrfs-ublk.fish",
)
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print a script that has a shell complete commands.

    SHELL is bash, zsh or fish. Commands, options, files, and names of devices, volumes,
    suites and peers are completed, where a command takes nothing else; the program
    itself is asked for them.
    """
    kind = get_completion_class(shell)
    assert kind is not None, shell
    root = context.find_root().command
    click.echo(kind(root, {}, _PROGRAM, _VARIABLE).source())
