"""Documents of benchmarks, and tables made of them.

A benchmark is a module of this package. It makes a document (JSON): what was asked for,
the environment, and one result for each turn. Its ``tables(document)`` is a pure
function, so that a stored document can be printed again:

``python -m btrfs_ublk.bench.report DOCUMENT``
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from btrfs_ublk.base.entry import PathType, run_command
from btrfs_ublk.bench.environment import environment
from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import format_size

Result = dict[str, Any]
Document = dict[str, Any]

#: Results that may be missing have a "status" of these, with a "reason".
OK, FAILED, SKIPPED = "ok", "failed", "skipped"

#: It fits every table: tables are as wide as their text, whatever the terminal.
CONSOLE_WIDTH = 1000
_NOTE_COLUMNS = 100


@dataclass(frozen=True)
class Table:
    """Text in columns; the first ``left`` are flush left, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    note: str = ""


def make_document(
    benchmark: str,
    *,
    parameters: dict[str, Any],
    directory: Path,
    results: list[Result],
) -> Document:
    """Make a document. ``benchmark`` names the module; images are in ``directory``."""
    return {
        "version": 1,
        "benchmark": benchmark,
        "parameters": parameters,
        "environment": environment(directory),
        "results": results,
    }


def tables_of(document: Document) -> list[Table]:
    """Make the tables of a document of any benchmark, or return those that it has, as
    those of campaigns do. Raises UsageError.
    """
    if "tables" in document:
        return [Table(**each) for each in document["tables"]]
    name = document.get("benchmark")
    try:
        if not str(name).isidentifier():
            raise ImportError
        module = import_module(f"{__package__}.{name}")
    except ImportError:
        raise UsageError(f"there is no benchmark {name!r}") from None
    tables: list[Table] = module.tables(document)
    return tables


def number(value: float, digits: int = 0) -> str:
    """Format a number: "31,250", "0.52", and a dash for NaN."""
    return "-" if value != value else f"{value:,.{digits}f}"


_GUESTS = {
    "icount": "VM that counts instructions: 1 is 1 ns",
    "tcg": "emulated VM",
    "kvm": "VM",
}


def _cpu_text(record: Mapping[str, Any]) -> str:
    """Describe a CPU: "emulated VM, QEMU TCG CPU without erms, fsrm"."""
    words = [record["cpu"]]
    guest = record.get("guest")
    if guest:
        words.insert(0, _GUESTS.get(guest, guest))
        lacking = [x for x in ("erms", "fsrm") if x not in record["cpu_flags"]]
        words[-1] += f" without {', '.join(lacking)}" if lacking else ""
    return ", ".join(words)


def environment_lines(record: Mapping[str, Any]) -> Iterable[str]:
    """Describe an environment() in a few lines."""
    load = " ".join(f"{value:.2f}" for value in record["load"])
    yield f"Linux {record['kernel']} {record['architecture']}, {_cpu_text(record)}"
    yield (
        f"{record['cpus']} CPUs, {format_size(record['memory_bytes'])} of memory; "
        f"load {load} at {record['time']}, benchmark at nice {record['nice']}"
    )
    yield (
        f"images on {record['file_system']} of "
        f"{format_size(record['file_system_bytes'])} "
        f"({format_size(record['file_system_free_bytes'])} free), buffered loop devices"
    )
    versions = [f"btrfs-ublk {record['btrfs_ublk']} ({record['revision'] or 'wheel'})"]
    versions += [record["btrfs_progs"] or "no btrfs-progs"]
    yield ", ".join([*versions, f"Python {record['python']}"])


def print_table(console: Console, table: Table) -> None:
    """Print an empty line, then a table's title, columns, rows, and note."""
    shown = RichTable(box=None, pad_edge=False)
    for position, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if position < table.left else "right")
    for row in table.rows:
        shown.add_row(*map(escape, row))
    console.print()
    console.print(f"[bold]{escape(table.title)}[/bold]")
    console.print(shown)
    if table.note:
        console.print(escape(fill(table.note, _NOTE_COLUMNS)))


def show(document: Document, console: Console | None = None) -> None:
    """Print the environment and all tables."""
    console = console or Console(highlight=False, width=CONSOLE_WIDTH)
    for line in environment_lines(document["environment"]):
        console.print(escape(line))
    for table in tables_of(document):
        print_table(console, table)


def to_text(document: Document) -> str:
    """Return a document as JSON with one result a line."""
    keys = []
    for key, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        keys.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(keys) + "\n}"


def finish(document: Document, *, as_json: bool) -> None:
    """Print what a benchmark's command prints at its end."""
    if as_json:
        click.echo(to_text(document))
    else:
        show(document)


def load(path: Path) -> Document:
    """Load a stored document. Raises UsageError for an invalid one."""
    try:
        document: Document = json.loads(path.read_text())
        if not {"benchmark", "environment", "results"} <= document.keys():
            raise ValueError("it has no results")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is not what a benchmark printed: {error}") from error
    return document


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=PathType())
def command(path: Path) -> None:
    """Print the tables of a document that a benchmark made with --json."""
    show(load(path))


if __name__ == "__main__":
    run_command(command, name="python -m btrfs_ublk.bench.report")
