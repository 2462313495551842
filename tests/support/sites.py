"""Networks of a site, and a ring of caches in it."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from support.processes import ending_with_us, free_ports
from support.web_servers import NGINX

from btrfs_ublk.ops.site_cache.config import Node, SiteCache

_CLONE_NEWNET = 0x40000000
_OURS = "/proc/thread-self/ns/net"
_ROOT, _HANDLE = 0xFFFFFFFF, 0x10000
_BURST_BYTES, _QUEUED = 64 << 10, "200ms"
_PREFIX_BITS = 16

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: Callable[..., int], *arguments: int) -> None:
    if function(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{function.__name__}: {os.strerror(code)}")


@contextmanager
def _back_here() -> Iterator[None]:
    """Return to this thread's namespace at the end."""
    home = os.open(_OURS, os.O_RDONLY)
    try:
        yield
    finally:
        _call(_libc.setns, home, _CLONE_NEWNET)
        os.close(home)


@contextmanager
def _inside(namespace: int) -> Iterator[None]:
    with _back_here():
        _call(_libc.setns, namespace, _CLONE_NEWNET)
        yield


@contextmanager
def _namespace() -> Iterator[int]:
    """Yield the descriptor of a new one, in which loopback is up."""
    with _back_here():
        _call(_libc.unshare, _CLONE_NEWNET)
        made = os.open(_OURS, os.O_RDONLY)
        with IPRoute() as route:
            route.link("set", index=route.link_lookup(ifname="lo")[0], state="up")
    try:
        yield made
    finally:
        os.close(made)


@dataclass(frozen=True)
class Machine:
    """A namespace, and its address on the network."""

    address: str
    _namespace: int

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Have this thread be there; sockets that it makes, and processes that it
        starts, stay there."""
        with _inside(self._namespace):
            yield

    @contextmanager
    def _link(self) -> Iterator[tuple[IPRoute, int]]:
        with self.inside(), IPRoute() as route:
            yield route, route.link_lookup(ifname="eth0")[0]

    def unplug(self) -> None:
        """Let it vanish: what it has sent last is the last that anybody hears of it."""
        with self._link() as (route, index):
            route.link("set", index=index, state="down")

    def plug(self) -> None:
        """Have it again after unplug()."""
        with self._link() as (route, index):
            route.link("set", index=index, state="up")

    def readdress(self, old: str, new: str) -> None:
        """Let it have another address; nothing answers at the old one."""
        with self._link() as (route, index):
            route.addr("del", index=index, address=old, prefixlen=_PREFIX_BITS)
            route.addr("add", index=index, address=new, prefixlen=_PREFIX_BITS)

    def limit(self, bits_per_s: float | None) -> None:
        """Let it send at most that much; None: as much as it can."""
        with self._link() as (route, index):
            if bits_per_s is None:
                route.tc("del", index=index, root=True)
                return
            route.tc(
                "add",
                "tbf",
                index=index,
                handle=_HANDLE,
                parent=_ROOT,
                rate=f"{round(bits_per_s)}bit",
                burst=_BURST_BYTES,
                latency=_QUEUED,
            )


class Network:
    """Machines can be added until the block ends."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._count = 0

    def __enter__(self) -> Network:
        self._bridge = self._stack.enter_context(_namespace())
        with _inside(self._bridge), IPRoute() as route:
            route.link("add", ifname="bridge", kind="bridge")
            index = route.link_lookup(ifname="bridge")[0]
            route.link("set", index=index, state="up")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, *, bits_per_s: float | None = None) -> Machine:
        """Add a machine, which sends at most that much."""
        self._count += 1
        there = self._stack.enter_context(_namespace())
        address = f"10.77.{self._count // 250}.{self._count % 250 + 1}"
        with _inside(self._bridge), IPRoute() as route:
            port = f"port{self._count}"
            peer = {"ifname": "eth0", "net_ns_fd": there}
            route.link("add", ifname=port, kind="veth", peer=peer)
            route.link(
                "set",
                index=route.link_lookup(ifname=port)[0],
                master=route.link_lookup(ifname="bridge")[0],
                state="up",
            )
        with _inside(there), IPRoute() as route:
            index = route.link_lookup(ifname="eth0")[0]
            route.addr("add", index=index, address=address, prefixlen=_PREFIX_BITS)
            route.link("set", index=index, state="up")
        machine = Machine(address, there)
        if bits_per_s is not None:
            machine.limit(bits_per_s)
        return machine


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


def write_configuration(root: Path, cache: SiteCache) -> list[str | Path]:
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
    words = [*write_configuration(root, cache), "-t"]
    subprocess.run(words, check=True, env=_environment())


def _start(root: Path, cache: SiteCache) -> subprocess.Popen[bytes]:
    words = write_configuration(root, cache)
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
        ports = free_ports(2 * count)
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
