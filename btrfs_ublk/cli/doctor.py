"""``btrfs-ublk doctor``"""

from __future__ import annotations

import json
import platform

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from btrfs_ublk.base.capabilities import ROOT
from btrfs_ublk.base.entry import json_option
from btrfs_ublk.errors import CapabilityError
from btrfs_ublk.ops.doctor import Ability, Diagnosis, diagnose
from btrfs_ublk.ops.doctor.install import command_for

_WIDTH = 80  # if the output is no terminal
_WORDS = {
    "yes": ("yes", "green"),
    "no": ("no", "red"),
    "root": ("root", "yellow"),
    "unknown": ("?", "yellow"),
}


@click.command("doctor")
@click.option("--all", "everything", is_flag=True, help="Say all that was looked at.")
@json_option
def command(everything: bool, as_json: bool) -> int:
    """Say what this machine can do, and what is missing.

    With the first reason, and the command that gets it. "root": as root, it can; "?":
    this user may not look. Looks only: loads no module, makes no file or device.

    Exit status 0: seeds can be made, served (with ublk or fuse) and mounted; 3: not.
    """
    found = diagnose()
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        _print(found, everything)
    return 0 if found.usable else CapabilityError.exit_status


def _print(found: Diagnosis, everything: bool) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    versions = found.versions
    who = "root" if found.is_root else "a user who is not root"
    console.print(
        f"btrfs-ublk {versions.btrfs_ublk}, Linux {versions.kernel} on "
        f"{platform.machine()}, as {who}",
        markup=False,
    )
    for name, version in versions.other_helpers.items():
        console.print(f"[red]{name}: {version or 'not built'}[/red]")
    console.print()
    shown = found.abilities
    if not everything:
        shown = tuple(ability for ability in shown if ability.answer == "no")
        table = _table()
        for answer in ("yes", "root", "unknown"):
            names = [each.about for each in found.abilities if each.answer == answer]
            if names:
                table.add_row(Text(*_WORDS[answer]), "; ".join(names))
        _echo(console, table)
    table = _table()
    for ability in shown:
        table.add_row(
            Text(*_WORDS[ability.answer]),
            Text(ability.about, no_wrap=True),
            _details(ability, everything),
        )
    _echo(console, table)
    console.print()
    for device, problem in found.disk_problems:
        click.echo(f"device {device}: {problem}")
    if not found.is_root:
        click.echo(f"Some of it takes root: $ {command_for(ROOT)}")
    if found.usable:
        console.print("[green]Seeds can be made, served and mounted here.[/green]")
    else:
        console.print(f"[red]Not yet: {', '.join(found.wanting)}.[/red]")


def _table() -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(
        no_wrap=True, min_width=max(len(word) for word, _ in _WORDS.values())
    )
    return table


def _echo(console: Console, table: Table) -> None:
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line if console.is_terminal else line.rstrip())


def _details(ability: Ability, everything: bool) -> Text:
    lines = [Text(ability.note)] if ability.note else []
    # That root is missing is reported once, at the end.
    missing = [each for each in ability.missing if each.what != ROOT.name]
    for finding in missing if everything else missing[:1]:
        lines.append(Text(f"{finding.what}: {finding.reason}"))
        if finding.command:
            lines.append(Text("$ " + finding.command, "bold"))
        says_no_more = finding.hint == f"run {finding.command}"
        if finding.hint and not says_no_more and (everything or not finding.command):
            lines.append(Text(finding.hint))
    if everything:
        lines += [
            Text(f"not looked at: {each.what}: {each.reason}", "dim")
            for each in ability.unseen
        ]
    elif len(missing) > 1:
        lines.append(Text(f"and {len(missing) - 1} more: --all", "dim"))
    return Text("\n", overflow="fold").join(lines)  # no path is cut off
