"""``btrfs-ublk daemon``"""

from __future__ import annotations

import click

from btrfs_ublk.base.signals import deferred


@click.group("daemon")
def command() -> None:
    """Run the process that supervises all devices of this host.

    Commands that need it start it, unless systemd does.
    """


@command.command("serve")
def serve_command() -> None:
    """Supervise devices in the foreground, for systemd.

    A daemon that a command has started is asked to end. TERM and INT end this one: all
    devices are served on, and supervised again by the next one. HUP replaces it by the
    version that is installed now. It also ends when there has been no device for 30
    seconds.
    """
    with deferred():
        # The daemon's program takes the place of this one.
        from btrfs_ublk.supervision.client import become_daemon
    become_daemon()
