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
@json_option
def command(as_json: bool) -> int:
    """Say what this machine can do, and what is missing.

    With the reason, and the command that gets it. "root": as root, it can; "?": this
    user may not look. Looks only: loads no module, makes no file or device.

    Exit status 0: seeds can be made, served (with ublk or fuse) and mounted; 3: not.
    """
    found = diagnose()
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        _print(found)
    return 0 if found.usable else CapabilityError.exit_status


def _print(found: Diagnosis) -> None:
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
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for ability in found.abilities:
        word, colour = _WORDS[ability.answer]
        table.add_row(Text(word, colour), ability.about, _details(ability))
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line if console.is_terminal else line.rstrip())
    console.print()
    for device, problem in found.disk_problems:
        click.echo(f"device {device}: {problem}")
    if not found.is_root:
        click.echo(f"Some of it takes root: $ {command_for(ROOT)}")
    if found.usable:
        console.print("[green]Seeds can be made, served and mounted here.[/green]")
    else:
        console.print(f"[red]Not yet: {', '.join(found.wanting)}.[/red]")


def _details(ability: Ability) -> Text:
    text = Text(ability.note or "")
    for finding in ability.missing:
        if finding.what == ROOT.name:
            continue  # reported once, at the end
        if text:
            text.append("\n")
        text.append(f"{finding.what}: {finding.reason}")
        if finding.hint:
            text.append("\n" + finding.hint)
        if finding.command:
            text.append("\n$ " + finding.command, "bold")
    for finding in ability.unseen:
        if text:
            text.append("\n")
        text.append(f"not looked at: {finding.what}: {finding.reason}", "dim")
    return text
