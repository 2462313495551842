"""``btrfs-ublk bench report``: one page that shows results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click

from btrfs_ublk.bench import options
from btrfs_ublk.capabilities import require
from btrfs_ublk.errors import BtrfsUblkError, UsageError


@dataclass(frozen=True)
class PythonPackage:
    """One of those that only the report needs."""

    name: str

    @property
    def cure(self) -> str:
        return (
            "scripts/setup --bench in a checkout; elsewhere "
            f"{sys.executable} -m pip install {self.name}"
        )

    def probe(self) -> str | None:
        found = find_spec(self.name.lower()) is not None
        return None if found else "this Python does not have it"


PACKAGES = (PythonPackage("matplotlib"), PythonPackage("Jinja2"))


@click.command("report", context_settings=options.SETTINGS)
@click.argument(
    "results", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False)
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    help="The page.",
)
@click.option(
    "--plots",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the plots, as SVG and PNG; made where it is not there.",
)
def command(results: Sequence[Path], output: Path, plots: Path | None) -> None:
    """Make one page of files of results.

    RESULTS are what `bench matrix` wrote, and what `bench compare` and the other
    benchmarks printed with --json.

    The page needs nothing else, no network and no scripts. Results of different
    machines stand in sections of their own.
    """
    require(*PACKAGES)
    # They are needed for nothing else, so they are imported here.
    from btrfs_ublk.bench.page.build import build
    from btrfs_ublk.bench.page.inputs import clean, read_inputs
    from btrfs_ublk.bench.page.render import render, write_whole

    for path in results:
        if output.exists() and path.exists() and output.samefile(path):
            raise UsageError(f"{output} is one of the results: it would be overwritten")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {output.absolute().parent}")
    page = build(read_inputs(results), png=plots is not None)
    text = render(page, command=clean(_command(results, output, plots)))
    if plots is not None:
        try:
            plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BtrfsUblkError(f"no directory {plots}: {error.strerror}") from error
        for picture in page.pictures:
            write_whole(plots / f"{picture.name}.svg", picture.standalone.encode())
            if picture.png is not None:
                write_whole(plots / f"{picture.name}.png", picture.png)
        click.echo(f"{plots}: {len(page.pictures)} plots as SVG and PNG", err=True)
    write_whole(output, text.encode())
    click.echo(f"{output}: {len(text.encode()) / 1024:,.0f} KiB", err=True)


def _command(results: Sequence[Path], output: Path, plots: Path | None) -> str:
    """What makes this page, without the directories of this machine."""
    words = ["btrfs-ublk", "bench", "report", *(path.name for path in results)]
    words += ["-o", output.name]
    if plots is not None:
        words += ["--plots", plots.name]
    return shlex.join(words)
