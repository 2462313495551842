"""Python's http.server, which knows no ranges."""

import sys
from pathlib import Path

from support.peer import Peer, Web

_WHOLE = "answers with the whole object"


class _Python:
    def install(self) -> str | None:
        return None

    def program(self) -> Path:
        return Path(sys.executable)

    def version(self) -> str:
        return ".".join(map(str, sys.version_info[:3]))


def _argv(peer: Peer) -> list[str | Path]:
    where = ["--bind", "127.0.0.1", "--directory", peer.files]
    return [peer.package.program(), "-m", "http.server", *where, str(peer.port)]


PEER = Web(
    name="Python's http.server",
    package=_Python(),
    argv=_argv,
    otherwise=dict.fromkeys(("whole and in parts", "replaced", "restarted"), _WHOLE),
    notes="it answers a range with everything",
)
