"""The control socket that clients connect to: who may, and what they cannot hold up."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from support.needs import Need
from support.processes import (
    END_TIMEOUT_S,
    READY_TIMEOUT_S,
    REPLY_TIMEOUT_S,
    ServerProcess,
    assert_answers,
)
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import FUSE, ROOT
from btrfs_ublk.server import Description, FrontEndName, ZeroSegment
from btrfs_ublk.units import MIB

ZEROES = Description(MIB, [ZeroSegment(offset=0, length=MIB)])
CLIENTS = 16
NOBODY = 65534


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


def test_nothing_happens_when_clients_leave(server: ServerProcess) -> None:
    for _ in range(3 * CLIENTS):
        server.connect().close()
    with server.connect() as client:
        client.socket.sendall(b'{"request": "st')
    assert_answers(server)
    assert server.process.poll() is None


def test_half_lines_and_many_in_one(server: ServerProcess) -> None:
    with server.connect() as client:
        for byte in b'{"request": "stats"}\n':
            client.socket.sendall(bytes([byte]))
        assert client.line()["reply"] == "stats"
        client.socket.sendall(b'{"request": "info"}\n' * 20 + b'{"req')
        assert [client.line()["reply"] for _ in range(20)] == ["info"] * 20
        client.socket.sendall(b'uest": "stats"}\n')
        assert client.line()["reply"] == "stats"


def test_a_line_of_100_mb(server: ServerProcess) -> None:
    with server.connect() as client:
        for _ in range(100):
            client.socket.sendall(b"x" * 1_000_000)
        client.socket.sendall(b"\n")
        assert client.line() == {"error": "request too long"}
        assert client.request("stats")["reply"] == "stats"


def test_a_client_with_too_many_requests_has_to_wait(server: ServerProcess) -> None:
    """It is not refused, and the others do not notice."""
    with server.connect() as client:
        begin_s = time.monotonic()
        sent = 0
        while sent < 2500:
            client.socket.sendall(b'{"request": "bla"}\n' * 100)
            for _ in range(100):
                assert "unknown" in client.line()["error"]
            sent += 100
        assert time.monotonic() - begin_s > 1.0
        assert_answers(server)


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


def test_a_client_that_never_reads_is_dropped(server: ServerProcess) -> None:
    with server.connect() as client:
        client.socket.settimeout(1.0)
        with pytest.raises(OSError):
            while True:  # its answers fill the socket, then it is hung up on
                client.socket.sendall(b'{"request": "info"}\n' * 100)
        assert_answers(server)


@pytest.mark.timing
def test_a_client_that_reads_late_gets_all_of_it(server: ServerProcess) -> None:
    """More than the socket holds, as statistics of many hosts are."""
    with server.connect() as client:
        client.socket.sendall(b'{"request": "info"}\n' * 800)
        time.sleep(0.2)
        assert {client.line()["reply"] for _ in range(800)} == {"info"}


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


def test_silent_clients_make_room_in_time(server: ServerProcess) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(server.connect()) for _ in range(CLIENTS)]
        for client in silent:
            assert client.request("stats")["reply"] == "stats"

        def has_room() -> bool:
            assert silent[0].request("stats")["reply"] == "stats"
            with server.connect() as late, suppress(ConnectionError):
                late.send({"request": "stats"})
                return late.line().get("reply") == "stats"
            return False

        assert not has_room()
        wait_until(has_room)
        assert silent[0].request("stats")["reply"] == "stats"
        with pytest.raises(EOFError):
            silent[1].line()


def test_a_lowered_limit_of_open_files_does_not_end_it(server: ServerProcess) -> None:
    """poll(2) fails where it has more descriptors than the limit allows."""
    pid = server.process.pid
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (most, most)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, most))
    for _ in range(2):
        with server.connect() as client:
            assert client.request("info")["info"]["pid"] == pid
    assert server.stop()["stats"]["errors"] == 0


def test_another_user_is_refused(server: ServerProcess) -> None:
    for path in (server.socket_path, server.socket_path.parent):
        path.chmod(0o777)
    # Where it stands is closed to others as well: it is reached by way of a descriptor.
    directory = os.open(server.socket_path.parent, os.O_PATH)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.fchdir(directory)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(REPLY_TIMEOUT_S)
                connection.connect("control")
                with connection.makefile("rb") as file:
                    error = json.loads(file.readline())
                    status = 0 if "only root and user 0" in error["error"] else 2
                    status = status or 3 * bool(file.readline())
        finally:
            os._exit(status)
    os.close(directory)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_answers(server)


def test_handover_is_refused_where_nothing_would_stay(server: ServerProcess) -> None:
    assert "no recovery mode" in server.request("handover")["error"]
    assert_answers(server)


def test_any_front_end(front_end: FrontEndName) -> None:
    with ServerProcess(ZEROES, front_end=front_end) as server:
        server.wait_ready()
        info = server.request("info")["info"]
        assert (info["front_end"], info["recovery"]) == (front_end, "none")
        assert "error" in server.request("handover")
        server.stop()


@pytest.mark.parametrize("option", ["--listen-fd", "--control-fd"])
def test_what_is_no_socket_is_refused(option: str) -> None:
    with ServerProcess(ZEROES, option, "0", front_end="fuse") as server:
        assert f"{option} 0 is no" in server.failure(2)
