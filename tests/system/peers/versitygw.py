"""versitygw, an S3 gateway to a file system."""

from pathlib import Path

from support.peer import Go, Peer, Store
from support.s3_server import ACCESS_KEY, SECRET_KEY


def _argv(peer: Peer) -> list[str | Path]:
    where = ["--port", f"127.0.0.1:{peer.port}", "--quiet"]
    return [peer.package.program(), *where, "posix", peer.files]


PEER = Store(
    name="versitygw",
    package=Go("github.com/versity/versitygw/cmd/versitygw", "1.8.0", "versitygw"),
    argv=_argv,
    environment={"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
)
