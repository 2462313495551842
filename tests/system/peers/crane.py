"""The registry of go-containerregistry, which its command crane runs."""

from pathlib import Path

from support.peer import Go, Peer, Registry


def _argv(peer: Peer) -> list[str | Path]:
    where = ["--address", f"127.0.0.1:{peer.port}", "--disk", peer.files]
    return [peer.package.program(), "registry", "serve", *where]


PEER = Registry(
    name="crane registry serve",
    package=Go("github.com/google/go-containerregistry/cmd/crane", "0.22.1", "crane"),
    argv=_argv,
)
