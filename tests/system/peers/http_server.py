"""http-server of npm."""

from pathlib import Path

from support.peer import Npm, Peer, Web


def _argv(peer: Peer) -> list[str | Path]:
    where = ["-a", "127.0.0.1", "-p", str(peer.port), "-c-1", "-s"]
    return [peer.package.program(), peer.files, *where]


PEER = Web(
    name="http-server",
    package=Npm("http-server", "14.1.1", "node_modules/.bin/http-server"),
    argv=_argv,
)
