"""``btrfs-ublk``: the command whose nouns are the modules of this package."""

from __future__ import annotations

import json

import click

from btrfs_ublk.base.entry import ModuleGroup, end_process, run_command
from btrfs_ublk.base.log import setup_logging
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import UsageError


@click.command(
    cls=ModuleGroup,
    package="btrfs_ublk.cli",
    but=("main", "map_options", "mirror_options", "volume_options"),
    invoke_without_command=True,
    no_args_is_help=True,
    # All commands inherit these settings.
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option("--version", is_flag=True, help="Print all versions, and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --version: print JSON.")
@click.option(
    "-v",
    "--verbose",
    count=True,
    show_default=False,
    help="Say what is done; twice: commands.",
)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@click.pass_context
def command(
    context: click.Context, version: bool, as_json: bool, verbose: int, quiet: bool
) -> None:
    """Serve btrfs file systems whose data arrive when they are read.

    `btrfs-ublk doctor` says what this machine can do, and how to get what is missing.

    Exit status: 0; 1 failure; 2 wrong usage or input; 3 this machine lacks what is
    needed, and the message says what; 128 + N after signal N.
    """
    setup_logging(verbosity=-1 if quiet else verbose)
    if version:
        _print_versions(as_json)
        context.exit()
    if as_json:
        raise UsageError(
            "--json belongs to --version here", hint="else it comes after the command"
        )
    if context.invoked_subcommand is None:
        context.fail("Missing command.")


def _print_versions(as_json: bool) -> None:
    with deferred():
        # Other commands need none of it.
        from btrfs_ublk.ops.versions import find_versions
    versions = find_versions()
    if as_json:
        click.echo(json.dumps(versions.to_dict(), indent=2))
        return
    ours = versions.btrfs_ublk
    same = len(versions.helpers) - len(versions.other_helpers)
    click.echo(f"btrfs-ublk {ours}")
    click.echo(f"  helpers      {same} of {len(versions.helpers)} of this version")
    for name, version in versions.other_helpers.items():
        click.echo(f"    {name}: {version or 'not built, or it does not run'}")
    if versions.other_helpers:
        click.echo("    build package and helpers from one version: pip install .")
    click.echo(f"  kernel       {versions.kernel}")
    click.echo(f"  btrfs-progs  {versions.btrfs_progs or 'not installed'}")
    click.echo(f"  Python       {versions.python}")


def main() -> None:
    """The entry point; run_command() describes the exit status."""
    try:
        run_command(command, name="btrfs-ublk")
    except SystemExit as end:
        end_process(int(end.code or 0))


if __name__ == "__main__":
    main()
