"""``btrfs-ublk device``"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from btrfs_ublk import device as devices
from btrfs_ublk.base.entry import (
    CountType,
    NounGroup,
    PathType,
    SecondsType,
    SizeType,
    completing,
    former_realtime_option,
    json_option,
    print_found,
    read_text,
    stacked,
)
from btrfs_ublk.base.signals import too_late
from btrfs_ublk.base.text import table
from btrfs_ublk.device.state import (
    DEFAULT_HANG_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    FORMER_RECOVERY,
    device_directories,
)
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.server import Description, FrontEndName, ServerStats
from btrfs_ublk.units import format_size, parse_block_size

_name = click.argument(
    "name", shell_complete=completing(lambda: (x.name for x in device_directories()))
)
_timeout = click.option(
    "--timeout",
    "timeout_s",
    type=SecondsType(0.1, 1e6),
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    help="How long to wait for the server.",
)

_description = click.argument("description", type=PathType())
_server = click.option(
    "--server",
    type=PathType(),
    help="Another program than the package's btrfs-ublk-server.",
)
#: What commands have that change a device.
_changing = stacked(_name, _timeout, json_option)


class _RecoveryChoice(click.Choice):  # type: ignore[type-arg]
    """A choice that also accepts a former name, without showing it."""

    def convert(self, value: Any, *rest: Any) -> Any:
        return value if value == FORMER_RECOVERY else super().convert(value, *rest)


#: The options that ``up`` and ``serve`` share.
_making_options = stacked(
    click.option(
        "--front-end",
        type=click.Choice(get_args(FrontEndName)),
        default="auto",
        show_default=True,
        help="auto: ublk where the kernel has it, and survives the death "
        "of its server.",
    ),
    click.option(
        "--recovery",
        type=_RecoveryChoice(["auto", "reissue", "queue", "fail-io", "none"]),
        default="auto",
        show_default=True,
        help="What reads do while the server is replaced, see above.",
    ),
    click.option(
        "--queues",
        type=CountType(0),
        help="Queues of the device, and so threads of the server.",
    ),
    click.option("--depth", type=CountType(0), help="Requests in flight per queue."),
    click.option(
        "--max-io",
        "max_io_bytes",
        type=SizeType(parse_block_size),
        help="The largest request, 64K or more.",
    ),
    click.option(
        "--feature",
        "features",
        multiple=True,
        metavar="NAME",
        help="ublk: insist on a feature of the driver, such as auto-buf-reg.",
    ),
    former_realtime_option,
    click.option("--id", "device_id", type=CountType(0), help="N of /dev/ublkbN."),
    click.option(
        "--hang-timeout",
        "hang_timeout_s",
        type=SecondsType(0),
        default=DEFAULT_HANG_TIMEOUT_S,
        show_default=True,
        help="A server that is silent for so long is replaced; 0: never.",
    ),
    _server,
)


@click.group(
    "device",
    cls=NounGroup,
    aliases={
        **{"add": "up", "show": "status", "ls": "list"},
        **{"del": "down", "remove": "down", "rm": "down", "stop": "down"},
    },
)
def command() -> None:
    """Make and keep block devices that outlive their servers.

    A device has a NAME: 1 to 64 of A-Z a-z 0-9 . _ -, the first a letter or a digit.
    The daemon, one for all devices, replaces its server when that dies.
    """


@command.command()
@click.argument("name")
@_description
@_making_options
@click.option(
    "--if-missing",
    is_flag=True,
    help="A device that is there already is recovered if need be; it may have grown "
    "out of DESCRIPTION.",
)
@_timeout
@json_option
def up(
    name: str,
    description: Path,
    if_missing: bool,
    timeout_s: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Make a device, and print its path.

    NAME is what it will be called, DESCRIPTION a file (JSON; - is standard input) that
    says what its blocks read as: `btrfs-ublk seed create --description` writes one.

    Recovery, for reads in flight when the server dies: reissue gives them to the next
    one (auto, where the kernel can), queue fails them; new reads wait. fail-io fails
    these too, until the next server is there. none: the device goes.
    """
    make = devices.have_device if if_missing else devices.add_device
    device = make(
        name,
        _read(description),
        devices.DeviceOptions(**options),
        timeout_s=timeout_s,
        made=too_late,
    )
    _print(device, as_json)


@command.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List all devices, and how they are."""
    found = devices.list_devices()
    rows = [("NAME", "HEALTH", "DEVICE", "FRONT END", "RECOVERIES", "IN USE")]
    rows += [
        (
            device.name,
            device.health,
            device.state.device or "-",
            device.spec.front_end if device.spec else "-",
            str(device.state.recoveries),
            "; ".join(device.users) or "-",
        )
        for device in found
    ]
    told = [device.to_dict() for device in found]
    print_found(told, [table(rows)], as_json=as_json)


@command.command()
@_name
@json_option
def status(name: str, as_json: bool) -> int:
    """Print health and statistics of a device.

    NAME is a device. Exit status 1: it is not well.
    """
    device = devices.show_device(name)
    print_found(device.to_dict(), _status_lines(device), as_json=as_json)
    return 0 if device.is_well else 1


@command.command()
@_changing
def down(name: str, timeout_s: float, as_json: bool) -> None:
    """Take a device down.

    NAME is a device. Refused while it is mounted or held open. Nothing of it stays, so
    `remove` is another word for this.
    """
    devices.remove_device(name, timeout_s=timeout_s)
    print_found({"name": name, "result": "removed"}, [], as_json=as_json)


@command.command()
@_changing
def recover(name: str, timeout_s: float, as_json: bool) -> None:
    """Replace what is dead: supervisor, server, or both.

    NAME is a device; who has it mounted need not do anything.
    """
    done = devices.recover_device(name, timeout_s=timeout_s)
    lines = done or [f"device {name} is healthy: nothing was done"]
    print_found({"name": name, "done": done}, lines, as_json=as_json)


@command.command()
@_changing
@_server
def upgrade(name: str, server: Path | None, timeout_s: float, as_json: bool) -> None:
    """Have this version serve a device.

    Its supervisor and server take the place of those of the device NAME, which may be
    mounted.
    """
    _print(devices.upgrade_device(name, server=server, timeout_s=timeout_s), as_json)


@command.command()
@_changing
@_description
def update(name: str, description: Path, timeout_s: float, as_json: bool) -> None:
    """Let a device grow.

    NAME is a device, which may be mounted; DESCRIPTION (a file; - is standard input)
    is the present one with a longer last segment, or more segments. It never shrinks.
    """
    _print(
        devices.update_device(name, _read(description), timeout_s=timeout_s), as_json
    )


@command.command("gc")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@_timeout
@json_option
def gc_command(dry_run: bool, timeout_s: float, as_json: bool) -> int:
    """Remove devices that are dead and not in use.

    Exit status 1: something is left.
    """
    found = devices.collect_devices(dry_run=dry_run, timeout_s=timeout_s)
    lines = [
        f"{outcome.result:12} {outcome.name}"
        + (f": {outcome.reason}" if outcome.reason else "")
        for outcome in found
    ]
    told = [outcome.to_dict() for outcome in found]
    print_found(told, lines or ["nothing to remove"], as_json=as_json)
    return 1 if any(outcome.result == "left" for outcome in found) else 0


@command.command()
@_name
@click.argument("description", type=PathType(), required=False)
@_making_options
@_timeout
def serve(name: str, description: Path | None, timeout_s: float, **options: Any) -> int:
    """Supervise a device in the foreground, for a service manager.

    The device NAME is made of DESCRIPTION if it is not there; it may have grown out of
    that since. TERM and INT end this command only: the device is served on. Recoveries
    are those of `btrfs-ublk device up`.
    """
    made = None if description is None else _read(description)
    return devices.serve_device(
        name, made, devices.DeviceOptions(**options), timeout_s=timeout_s
    )


def _read(path: Path) -> Description:
    text = read_text(path)
    try:
        return Description.from_json(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from error


def _print(device: devices.Device, as_json: bool) -> None:
    print_found(device.to_dict(), [str(device.path)], as_json=as_json)


def _status_lines(device: devices.Device) -> list[str]:
    state, spec = device.state, device.spec
    lines: list[tuple[str, object]] = [("health", device.health)]
    if device.reason:
        lines.append(("because", device.reason))
    if spec is not None:
        recovery = state.ready.get("recovery", spec.recovery)
        lines += [
            ("device", state.device or "-"),
            ("front end", f"{spec.front_end}, recovery {recovery}"),
            ("in use", "; ".join(device.users) or "no"),
            ("server", state.server.pid if state.server else "-"),
            ("supervisor", state.supervisor.pid if state.supervisor else "-"),
            ("keeper", ", ".join(str(x.process.pid) for x in state.keepers) or "-"),
            ("recoveries", state.recoveries),
            ("upgrades", state.upgrades),
        ]
        if state.last_end:
            lines.append(("last end", state.last_end))
    lines += _stats_lines(device.stats)
    lines.append(("log", device.log))
    return [f"{name:22} {value}" for name, value in lines]


def _stats_lines(raw: dict[str, Any] | None) -> list[tuple[str, str]]:
    if raw is None:
        return []
    try:
        stats = ServerStats.parse(raw)
    except BtrfsUblkError:
        return [("statistics", "from a server of another version: see --json")]
    lines = []
    for kind, counts in stats.kinds.items():
        text = f"{counts.reads} reads, {format_size(counts.read_bytes)}"
        if counts.writes:
            text += f"; {counts.writes} writes, {format_size(counts.write_bytes)}"
        text += f"; {counts.errors} errors"
        latency = counts.latency.reads
        if latency.count:
            p50, p99 = (latency.percentile_ns(x) / 1e3 for x in (50, 99))
            text += f"; reads take {p50:.0f} us, 99 % at most {p99:.0f} us"
        lines.append((kind, text))
    lines += [
        ("disk", problem) for lazy in stats.lazy for problem in lazy.disk_problems()
    ]
    if stats.refused:
        lines.append(("refused", f"{stats.refused} requests"))
    in_flight = sum(queue.in_flight for queue in stats.queues)
    return [*lines, ("in flight", f"{in_flight}, in {len(stats.queues)} queues")]
