"""nginx."""

from pathlib import Path

from support.peer import Debian, Peer, Web

_CONFIGURATION = """
daemon off;
user root;
pid {root}/pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {root}/tmp;
    server {{ listen 127.0.0.1:{port}; root {root}/files; }}
}}
"""


def _argv(peer: Peer) -> list[str | Path]:
    path = peer.root / "nginx.conf"
    path.write_text(_CONFIGURATION.format(root=peer.root, port=peer.port))
    return [peer.package.program(), "-e", "stderr", "-c", path]


PEER = Web(name="nginx", package=Debian("nginx", "/usr/sbin/nginx"), argv=_argv)
