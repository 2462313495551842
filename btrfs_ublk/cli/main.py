"""``btrfs-ublk``: the command whose nouns are the modules of this package."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import click

import btrfs_ublk
from btrfs_ublk import cli
from btrfs_ublk.entry import run_command
from btrfs_ublk.log import setup_logging


class _Nouns(click.Group):
    """Every module of this package but this one is a noun; imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = (module.name for module in iter_modules(cli.__path__))
        return sorted(name.replace("_", "-") for name in names if name != "main")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"{cli.__name__}.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command


@click.command(cls=_Nouns, context_settings={"help_option_names": ["-h", "--help"]})
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
