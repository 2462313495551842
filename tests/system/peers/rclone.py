"""rclone serve http."""

from pathlib import Path

from support.peer import Debian, Peer, Web


def _argv(peer: Peer) -> list[str | Path]:
    where = ["--addr", f"127.0.0.1:{peer.port}", "--config", "/dev/null"]
    # Else it keeps sizes and dates for five minutes.
    fresh = ["--dir-cache-time", "0"]
    return [peer.package.program(), "serve", "http", *where, *fresh, peer.files]


PEER = Web(
    name="rclone serve http",
    package=Debian("rclone", "/usr/bin/rclone"),
    argv=_argv,
)
