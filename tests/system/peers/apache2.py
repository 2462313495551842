"""The HTTP server of Apache."""

from pathlib import Path

from support.peer import Debian, Peer, Web

_CONFIGURATION = """
LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
ServerName localhost
ServerRoot {root}
DefaultRuntimeDir {root}
PidFile {root}/pid
Listen 127.0.0.1:{port}
DocumentRoot {root}/files
ErrorLog /dev/stderr
"""


def _argv(peer: Peer) -> list[str | Path]:
    path = peer.root / "apache2.conf"
    path.write_text(_CONFIGURATION.format(root=peer.root, port=peer.port))
    return [peer.package.program(), "-X", "-f", path]


PEER = Web(
    name="Apache HTTP Server",
    package=Debian("apache2-bin", "/usr/sbin/apache2"),
    argv=_argv,
)
