"""The program ``btrfs-ublk``. What the daemon can answer is asked, or looked for, here
without the rest of the command line (cli/main.py), whose imports take longer."""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # The module that has it takes long to import.
if TYPE_CHECKING:
    from typing import Any

#: By noun and verb: a request, and the keys of its arguments (docs/design/protocol.md)
_FORMS: dict[tuple[str, ...], tuple[str, tuple[str, ...]]] = {
    ("volume", "list"): ("list", ()),
    ("volume", "status"): ("status", ("volume",)),
    ("image", "fork"): ("fork", ("volume", "fork")),
    ("image", "forks"): ("forks", ("volume",)),
}
_MODES = ("overlay", "snapshot")
#: What a command can find out for itself as well.
_READ_ONLY = ("list", "status")
_MAX_BYTES = 1 << 16
#: If it does not answer within this time, somebody may have stopped it (SIGSTOP).
_SILENT_S = 0.5
_TIMEOUT_S = 120.0
#: To look for garbage after each 700 objects, as by default, takes a twelfth of the
#: time of imports, which leave none.
_OBJECTS_PER_COLLECTION = 20_000


def request_of(words: list[str]) -> dict[str, Any] | None:
    """Return the request for a command line; None for others, and for unusual forms of
    these."""
    name, keys = _FORMS.get(tuple(words[:2]), ("", ()))
    request: dict[str, Any] = {"request": name, "output": "text"}
    rest = iter(words[2:])
    values: list[str] = []
    for word in rest:
        if word == "--json":
            request["output"] = "json"
        elif word == "--mode" and name == "fork":
            request["mode"] = next(rest, "")
        elif not word or word.startswith("-") or not word.isascii():
            return None
        else:
            values.append(word)
    if (
        not name
        or len(values) != len(keys)
        or request.get("mode", _MODES[0]) not in _MODES
    ):
        return None
    return request | dict(zip(keys, values, strict=True))


def _ask(request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the daemon's reply; None when there is none, or it is not ready, or does
    not know the request."""
    import json
    import socket

    run = os.environ.get("BTRFS_UBLK_RUN_DIR") or "/run/btrfs-ublk"
    base = os.environ.get("BTRFS_UBLK_VOLUMES_DIR") or "/var/lib/btrfs-ublk/volumes"
    request["base"] = os.path.abspath(base)
    request["namespace"] = os.readlink("/proc/self/ns/mnt")
    if request["request"] in _READ_ONLY:
        request["if_ready"] = True
    if request["request"] in _READ_ONLY and request["output"] == "text":
        request["files"] = False  # there may be thousands
    is_sent = False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(os.path.join(run, "daemon", "socket"))
            option = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if int.from_bytes(option[4:8], sys.byteorder) not in (0, os.geteuid()):
                return None
            connection.send(json.dumps(request).encode())
            is_sent = True
            connection.settimeout(_SILENT_S)
            parts = []
            while True:
                try:
                    part = connection.recv(_MAX_BYTES)
                except TimeoutError:
                    if connection.gettimeout() != _SILENT_S:
                        raise
                    from btrfs_ublk.supervision.client import wake_daemon

                    wake_daemon()
                    connection.settimeout(_TIMEOUT_S)
                    continue
                if not part:
                    break
                parts.append(part)
        reply: dict[str, Any] = json.loads(b"".join(parts))
    except (OSError, ValueError) as failed:
        if is_sent and request["request"] == "fork":
            hint = (
                f"see if it made the fork: btrfs-ublk image forks {request['volume']}"
            )
            error = "the daemon ended before it answered"
            if isinstance(failed, TimeoutError):
                error = f"the daemon does not answer within {_TIMEOUT_S:g} s"
            return {"error": error, "hint": hint, "exit_status": 1}
        return None
    # An earlier version's daemon says that it is at fault; one that sees other mounts,
    # or that is not asked by root, refuses what this process can find out itself.
    ours = ("the daemon:", "the daemon runs in another mount namespace")
    is_unknown = str(reply.get("error", "")).startswith(ours)
    return None if is_unknown or "not_ready" in reply else reply


def _finish(reply: dict[str, Any]) -> None:
    """Print a reply, and end as run_command() does."""
    output = reply.get("output", "")
    if "error" not in reply and output.isascii():
        try:
            print(output, flush=True)
            os._exit(reply["exit_status"])
        except OSError:
            pass
    import click

    from btrfs_ublk.base.entry import run_command
    from btrfs_ublk.errors import error_of_status

    def again() -> int:
        if "error" in reply:
            kind = error_of_status(reply["exit_status"])
            raise kind(reply["error"], hint=reply.get("hint"))
        click.echo(output)
        return int(reply["exit_status"])

    sys.argv[1:] = []
    run_command(click.Command("btrfs-ublk", callback=again), name="btrfs-ublk")


def main() -> None:
    """The entry point."""
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    request = request_of(sys.argv[1:]) if sys.stdout and sys.stderr else None
    reply = _ask(request) if request else None
    if request and reply is None and request["request"] in _READ_ONLY:
        from btrfs_ublk.base.log import setup_logging
        from btrfs_ublk.volume.answers import reply_to

        setup_logging()
        reply = reply_to(request)
    if reply is not None:
        _finish(reply)
    from btrfs_ublk.cli.main import main as other

    other()


if __name__ == "__main__":
    main()
