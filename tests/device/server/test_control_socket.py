"""The control socket that clients connect to: who may, and what they cannot hold up."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.needs import Need
from support.processes import (
    END_TIMEOUT_S,
    READY_TIMEOUT_S,
    ServerProcess,
    assert_answers,
)

from btrfs_ublk.base.capabilities import FUSE, ROOT
from btrfs_ublk.server import Description, FrontEndName, ZeroSegment
from btrfs_ublk.units import MIB

ZEROES = Description(MIB, [ZeroSegment(offset=0, length=MIB)])
CLIENTS = 16


@pytest.fixture
def server(need: Need) -> Iterator[ServerProcess]:
    need(ROOT, FUSE)
    with ServerProcess(ZEROES, "--queues", "1", front_end="fuse") as it:
        it.wait_ready()
        yield it


def test_what_it_answers(server: ServerProcess) -> None:
    with server.connect() as client:
        info = client.request("info")["info"]
        assert info.items() >= server.ready.items()
        assert info["pid"] == server.process.pid
        assert info["version"] and 0 <= info["uptime_s"] < 600
        assert info["recovery"] == "none"
        assert client.request("stats")["stats"]["errors"] == 0
        unknown = client.request("bla")["error"]
        assert unknown.startswith("unknown request; known: ")
        known = unknown.partition("known: ")[2].split(", ")
        assert sorted(known) == ["handover", "info", "stats", "stop"]
        client.socket.sendall(b'{"request": "info", "protocol": 1}\n')
        assert client.line()["reply"] == "info"
        client.socket.sendall(b'{"request": "stop", "protocol": 2}\n')
        assert "protocol" in client.line()["error"]
        client.socket.sendall(b'["stop"]\nno json\n\n')
        assert "string" in client.line()["error"]
        assert client.line() == client.line() == {"error": "not valid JSON"}
    last = server.stop()
    assert last["stats"]["errors"] == 0 and last["handed_over"] is False


def test_descriptors_that_nobody_wants_are_closed(server: ServerProcess) -> None:
    def count() -> int:
        return len(os.listdir(f"/proc/{server.process.pid}/fd"))

    with server.connect() as client:
        assert client.request("stats")["reply"] == "stats"
        before = count()
        for _ in range(10):
            with open("/dev/null") as null:
                line = b'{"request": "stats"}\n'
                socket.send_fds(client.socket, [line], [null.fileno()] * 20)
            assert client.line()["reply"] == "stats"
        assert count() == before


def test_an_owner_that_never_reads_is_lost(need: Need) -> None:
    """What it was sent ends in the middle: it could make no sense of more."""
    need(ROOT, FUSE)
    owner, end = socket.socketpair()
    with owner, end, ServerProcess(ZEROES, front_end="fuse", owner=end) as server:
        owner.settimeout(READY_TIMEOUT_S)
        assert b'"ready"' in owner.recv(4096)
        owner.sendall(b'{"request": "info"}\n' * 800)
        assert server.process.wait(END_TIMEOUT_S) == 0


def test_all_places_taken(server: ServerProcess) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(server.connect()) for _ in range(CLIENTS)]
        for client in clients:
            assert client.request("stats")["reply"] == "stats"
        with server.connect() as late:
            assert "places" in late.line()["error"]
            with pytest.raises(EOFError):
                late.line()
        clients.pop().close()
        assert_answers(server)
        for client in clients:  # those inside do not notice
            assert client.request("stats")["reply"] == "stats"


def test_any_front_end(front_end: FrontEndName) -> None:
    with ServerProcess(ZEROES, front_end=front_end) as server:
        server.wait_ready()
        info = server.request("info")["info"]
        assert (info["front_end"], info["recovery"]) == (front_end, "none")
        assert "error" in server.request("handover")
        server.stop()
