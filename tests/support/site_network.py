"""A network of a site: namespaces on one bridge, with links of limited rate.

The namespaces have no names. So the kernel removes them, and all in them, when the last
process in them has ended, also after SIGKILL; and nothing of the machine's own network
is changed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pyroute2 import IPRoute

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
