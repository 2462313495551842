"""``btrfs-ublk``: the command whose nouns are the modules of this package."""

from __future__ import annotations

import click

import btrfs_ublk
from btrfs_ublk import cli
from btrfs_ublk.entry import ModuleGroup, run_command
from btrfs_ublk.log import setup_logging


@click.command(
    cls=ModuleGroup,
    package=cli,
    but=("main",),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(btrfs_ublk.__version__, prog_name="btrfs-ublk")
@click.option("-v", "--verbose", count=True, help="Say what is done; twice: commands.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
def command(verbose: int, quiet: bool) -> None:
    """Lazy data-block materialisation for btrfs."""
    setup_logging(verbosity=-1 if quiet else verbose)


def main() -> None:
    """The entry point; see run_command() for the exit status."""
    run_command(command, name="btrfs-ublk")


if __name__ == "__main__":
    main()
