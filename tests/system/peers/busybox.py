"""BusyBox's httpd."""

from pathlib import Path

from support.peer import Debian, Peer, Web


def _argv(peer: Peer) -> list[str | Path]:
    where = ["-p", f"127.0.0.1:{peer.port}", "-h", peer.files]
    return [peer.package.program(), "httpd", "-f", *where]


PEER = Web(
    name="BusyBox httpd",
    package=Debian("busybox-static", "/usr/bin/busybox"),
    argv=_argv,
)
