"""A container registry on loopback: the CNCF's distribution, from the package
``docker-registry``, without logins or TLS.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.base.process import spawn
from btrfs_ublk.errors import BtrfsUblkError

REGISTRY = Program("docker-registry", package="docker-registry")
_CONFIGURATION = """
version: 0.1
log: {{level: info, formatter: json}}
storage: {{filesystem: {{rootdirectory: {directory}/storage}}}}
http: {{addr: "127.0.0.1:0", secret: none}}
"""
_LISTENING = re.compile(r"listening on (127\.0\.0\.1:[0-9]+)")
_START_TIMEOUT_S, _POLL_S = 60.0, 0.02


@contextmanager
def loopback_registry(directory: Path) -> Iterator[str]:
    """Run a registry that keeps all it has in ``directory``, until the block is left;
    yields its host and port."""
    configuration, log = directory / "registry.yml", directory / "registry.log"
    log.unlink(missing_ok=True)  # what one before has said there is not this one's
    configuration.write_text(_CONFIGURATION.format(directory=directory))
    argv: list[str | Path] = [REGISTRY.name, "serve", configuration]
    environment = {"PATH": "/usr/bin", "OTEL_TRACES_EXPORTER": "none"}
    with spawn(argv, env=environment, talk=log) as child:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not (found := _LISTENING.search(log.read_text() if log.exists() else "")):
            if child.wait(_POLL_S) is not None or time.monotonic() > deadline_s:
                raise BtrfsUblkError(child.failure("did not begin to listen"))
        yield found[1]
