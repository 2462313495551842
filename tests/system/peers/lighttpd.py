"""lighttpd."""

from pathlib import Path

from support.peer import Debian, Peer, Web

_CONFIGURATION = """
server.bind = "127.0.0.1"
server.port = {port}
server.document-root = "{root}/files"
"""


def _argv(peer: Peer) -> list[str | Path]:
    path = peer.root / "lighttpd.conf"
    path.write_text(_CONFIGURATION.format(root=peer.root, port=peer.port))
    return [peer.package.program(), "-D", "-f", path]


PEER = Web(
    name="lighttpd", package=Debian("lighttpd", "/usr/sbin/lighttpd"), argv=_argv
)
