"""``btrfs-ublk bench report``: one page that shows results."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from btrfs_ublk.base.capabilities import REPORT_PACKAGES, require
from btrfs_ublk.base.entry import PathType
from btrfs_ublk.bench import options
from btrfs_ublk.errors import UsageError


@click.command("report", context_settings=options.SETTINGS)
@click.argument("results", nargs=-1, required=True, type=PathType(dir_okay=False))
@click.option(
    "-o",
    "--output",
    type=PathType(dir_okay=False),
    default=Path("report.html"),
    help="The page.",
)
def command(results: Sequence[Path], output: Path) -> None:
    """Make one page of files of results.

    RESULTS are what `bench matrix` wrote, and what `bench compare` and the other
    benchmarks printed with --json.

    The page needs no network and no scripts. Each machine has a section of its own.
    """
    require(*REPORT_PACKAGES)
    # Imported here, as only this command needs their packages.
    from btrfs_ublk.bench.page.build import build, render, write_whole
    from btrfs_ublk.bench.page.inputs import clean, read_inputs

    for path in results:
        if output.exists() and path.exists() and output.samefile(path):
            raise UsageError(f"{output} is one of the results: it would be overwritten")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {output.absolute().parent}")
    page = build(read_inputs(results))
    text = render(page, command=clean(_command(results, output)))
    write_whole(output, text.encode())
    click.echo(f"{output}: {len(text.encode()) / 1024:,.0f} KiB", err=True)


def _command(results: Sequence[Path], output: Path) -> str:
    """Return the command that makes this page, without directories of this machine."""
    words = ["btrfs-ublk", "bench", "report", *(path.name for path in results)]
    return shlex.join([*words, "-o", output.name])
