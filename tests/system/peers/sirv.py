"""sirv, by its command."""

from pathlib import Path

from support.peer import Npm, Peer, Web


def _argv(peer: Peer) -> list[str | Path]:
    where = ["--host", "127.0.0.1", "--port", str(peer.port)]
    return [peer.package.program(), peer.files, "--dev", "--quiet", *where]


PEER = Web(
    name="sirv",
    package=Npm("sirv-cli", "3.0.1", "node_modules/.bin/sirv"),
    argv=_argv,
)
