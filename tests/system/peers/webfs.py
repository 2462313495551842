"""webfs, a small web server."""

from pathlib import Path

from support.peer import Debian, Peer, Web


def _argv(peer: Peer) -> list[str | Path]:
    where = ["-i", "127.0.0.1", "-p", str(peer.port), "-r", peer.files]
    return [peer.package.program(), "-F", *where]


PEER = Web(name="webfs", package=Debian("webfs", "/usr/bin/webfsd"), argv=_argv)
