"""serve of npm."""

from pathlib import Path

from support.peer import Npm, Peer, Web


def _argv(peer: Peer) -> list[str | Path]:
    where = ["--listen", f"tcp://127.0.0.1:{peer.port}", "--no-clipboard"]
    return [peer.package.program(), *where, "--no-port-switching", peer.files]


PEER = Web(
    name="serve",
    package=Npm("serve", "14.2.7", "node_modules/.bin/serve"),
    argv=_argv,
    environment={"NO_UPDATE_CHECK": "1"},
)
