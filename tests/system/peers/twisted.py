"""Twisted's web server."""

import sys
from pathlib import Path

from support.peer import Peer, Pypi, Web

_PACKAGE = Pypi("twisted", "26.10.0", "bin/twist")


def _argv(peer: Peer) -> list[str | Path]:
    where = [f"--listen=tcp:{peer.port}:interface=127.0.0.1", f"--path={peer.files}"]
    return [sys.executable, peer.package.program(), "web", *where]


PEER = Web(
    name="Twisted Web",
    package=_PACKAGE,
    argv=_argv,
    environment={"PYTHONPATH": str(_PACKAGE.root)},
)
