"""``btrfs-ublk bench summarize``: tables of a matrix."""

from typing import IO

import click
from rich.console import Console
from rich.markup import escape

from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import CONSOLE_WIDTH, environment_lines, print_table
from btrfs_ublk.bench.summarize import parse_rows, summarize, tables


@click.command("summarize", context_settings=options.SETTINGS)
@click.argument("file", type=click.File("r"), default="-")
def command(file: IO[str]) -> None:
    """Print the tables of a matrix.

    Its results are JSON lines in FILE; without one, on standard input.

    Besides what `bench matrix` and `bench run` write, it takes lines that have nothing
    but the nine keys, total_iops and job_iops. Of several files, one after the other,
    all runs count.
    """
    parsed = parse_rows(file.read())
    if parsed.torn:
        click.echo("the last line has no end; it is left out", err=True)
    parts = summarize(parsed.rows)
    console = Console(highlight=False, width=CONSOLE_WIDTH)
    for part in parts:
        counts = ", ".join(f"{count} {name}" for name, count in part.statuses.items())
        console.print(f"[bold]Environment {escape(part.environment)}[/bold]")
        if part.environment in parsed.environments:
            for line in environment_lines(parsed.environments[part.environment]):
                console.print(escape(line))
        console.print(
            f"front end {part.front_end}, source {part.source}; runs: {counts}",
            markup=False,
        )
        if part.warning:
            console.print(part.warning, markup=False)
        for table in tables(part):
            print_table(console, table)
        console.print()
