"""The CNCF's distribution, which is the registry of many."""

from pathlib import Path

from support.peer import Debian, Peer, Registry

_CONFIGURATION = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {root}/files}}}}
http: {{addr: "127.0.0.1:{port}", secret: none}}
"""


def _argv(peer: Peer) -> list[str | Path]:
    path = peer.root / "registry.yml"
    path.write_text(_CONFIGURATION.format(root=peer.root, port=peer.port))
    return [peer.package.program(), "serve", path]


PEER = Registry(
    name="distribution",
    package=Debian("docker-registry", "/usr/bin/docker-registry"),
    argv=_argv,
    environment={"OTEL_TRACES_EXPORTER": "none"},
)
