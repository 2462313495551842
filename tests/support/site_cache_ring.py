"""Runs a ring of site caches: nginx processes on loopback, with our configuration."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.stopping import ending_with_us, freeze
from support.web_server import NGINX

from btrfs_ublk.ops.site_cache.config import Node, SiteCache

if TYPE_CHECKING:
    from support.site_network import Machine

START_TIMEOUT_S = 30
#: Somebody else may get one of the ports before it.
_STARTS = 3
#: NB: without a master, one process is the whole node, for kill -9 and SIGSTOP.
_MAIN = """
daemon off;
master_process off;
user root;
pid {root}/nginx.pid;
error_log {root}/error.log warn;
worker_rlimit_nofile 4096;
events {{ worker_connections 1024; }}
http {{
    client_body_temp_path {root}/tmp;
    proxy_temp_path {root}/tmp;
    fastcgi_temp_path {root}/tmp;
    uwsgi_temp_path {root}/tmp;
    scgi_temp_path {root}/tmp;
    include {root}/site-cache.conf;
}}
"""


@dataclass
class Ring:
    """Nodes that run; ``urls`` are what hosts ask."""

    nodes: list[Node]
    #: Where each has its files.
    roots: list[Path]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    scheme: str = "http"

    @property
    def urls(self) -> list[str]:
        return [f"{self.scheme}://{node.host}:{node.front_port}" for node in self.nodes]

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait(START_TIMEOUT_S)

    def silence(self, number: int) -> None:
        freeze(self.processes[number].pid)

    def spoil(self, number: int) -> int:
        """Change the last bytes of all that a node has stored, and return of how many
        slices."""
        paths = list(self.roots[number].glob("cache/*/*/*"))
        for path in paths:
            with open(path, "r+b") as file:
                file.seek(-1000, os.SEEK_END)
                file.write(bytes(1000))
        return len(paths)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
            for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in listeners]


def _words(root: Path, cache: SiteCache) -> list[str | Path]:
    """Write the configuration of a node, and return a command for it."""
    for path in (root, root / "tmp"):
        path.mkdir(exist_ok=True)
    (root / "site-cache.conf").write_text(cache.text())
    (root / "main.conf").write_text(_MAIN.format(root=root))
    return ["nginx", "-c", root / "main.conf", "-e", root / "error.log"]


def _environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"] + ":/usr/sbin"}


def check_configuration(root: Path, cache: SiteCache) -> None:
    """Have nginx say whether it would start with it."""
    words = [*_words(root, cache), "-t"]
    subprocess.run(words, check=True, env=_environment())


def _start(root: Path, cache: SiteCache) -> subprocess.Popen[bytes]:
    words = _words(root, cache)
    with open(root / "output", "wb") as output:
        return subprocess.Popen(
            ending_with_us(words, signal="KILL"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(),
        )


def _wait(node: Node, process: subprocess.Popen[bytes], root: Path) -> bool:
    """Return whether the node answers; False if it has ended."""
    until_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < until_s:
        with suppress(OSError):
            socket.create_connection((node.host, node.store_port), 1).close()
            return True
        time.sleep(0.02)
    return False


@contextmanager
def ring(
    root: Path, count: int, machines: Sequence[Machine] = (), **keys: Any
) -> Iterator[Ring]:
    """Run ``count`` nodes, on loopback or on ``machines`` of their own; ``keys`` are
    those of SiteCache."""
    assert NGINX.probe() is None
    inside: list[Callable[[], AbstractContextManager[None]]]
    inside = [each.inside for each in machines] or [nullcontext] * count
    for _ in range(_STARTS):
        ports = _free_ports(2 * count)
        nodes = [Node("127.0.0.1", *ports[n : n + 2]) for n in range(0, 2 * count, 2)]
        if machines:
            nodes = [Node(each.address) for each in machines]
        scheme = "https" if keys.get("certificate") else "http"
        homes = [root / f"node{number}" for number in range(count)]
        running = Ring(nodes, homes, scheme=scheme)
        try:
            for number, node in enumerate(nodes):
                home = homes[number]
                home.mkdir(exist_ok=True)
                cache = SiteCache(
                    nodes=nodes,
                    this=node,
                    directory=home / "cache",
                    max_bytes=1 << 30,
                    resolvers=["127.0.0.1"],
                    **keys,
                )
                with inside[number]():
                    running.processes.append(_start(home, cache))
            started = []
            for number, node in enumerate(nodes):
                with inside[number]():
                    started.append(_wait(node, running.processes[number], root))
            if all(started):
                yield running
                return
        finally:
            for process in running.processes:
                process.kill()
                process.wait(START_TIMEOUT_S)
    said = [path.read_text() for path in root.glob("node*/error.log")]
    raise AssertionError(f"nginx does not start: {said}")
