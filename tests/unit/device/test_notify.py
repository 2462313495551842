"""What is said to systemd, and what it keeps: with a socket instead of systemd."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from btrfs_ublk.device.notify import ServiceManager, StoredFds

NAME = "one/0123456789abcdef"


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.bind(str(tmp_path / "notify"))
        ours.settimeout(10)
        yield ours


def manager(systemd: socket.socket, **passed: str) -> ServiceManager:
    return ServiceManager({"NOTIFY_SOCKET": systemd.getsockname(), **passed})


def received(systemd: socket.socket) -> tuple[list[str], list[int]]:
    text, fds, _, _ = socket.recv_fds(systemd, 4096, 10)
    return text.decode().split("\n"), fds


def names_of(fds: list[int]) -> list[str]:
    return [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]


def passing(name: str, fd: int) -> ServiceManager:
    """A manager that has passed ``fd``, as if it were the first one."""
    made = ServiceManager({})
    made.passed[name] = fd
    return made


def test_descriptors_come_back_as_often_as_they_are_asked_for(
    systemd: socket.socket, tmp_path: Path
) -> None:
    """A daemon may be killed again, before it has stored anything."""
    files = [os.open(tmp_path / name, os.O_CREAT | os.O_RDWR) for name in ("a", "b")]
    stored = StoredFds(manager(systemd), NAME)
    stored.keep(files, {"ANSWER": "42"})
    assert received(systemd) == (["FDSTOREREMOVE=1", f"FDNAME={NAME}"], [])
    words, (queue,) = received(systemd)
    assert words == ["FDSTORE=1", "FDPOLL=0", f"FDNAME={NAME}"]
    # Nothing of a device's, which systemd would wait for.
    assert names_of([queue])[0].startswith("socket:")
    expected = names_of(files)
    for fd in files:
        os.close(fd)
    for _ in range(2):
        copy = os.dup(queue)
        found = StoredFds(passing(NAME, copy), NAME).restored()
        assert found is not None
        fds, environment = found
        assert names_of(fds) == expected and environment == {"ANSWER": "42"}
        for fd in [*fds, copy]:
            os.close(fd)
    os.close(queue)


def test_too_many_are_left_to_keepers(
    systemd: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    read_fd, write_fd = os.pipe()
    StoredFds(manager(systemd), NAME).keep([read_fd] * 253, {})
    os.close(read_fd)
    os.close(write_fd)
    assert "systemd cannot store 253 descriptors" in caplog.text
    systemd.setblocking(False)
    with pytest.raises(BlockingIOError):
        received(systemd)


def test_variables_are_not_inherited() -> None:
    environment = {
        "NOTIFY_SOCKET": "/run/systemd/notify",
        "LISTEN_PID": str(os.getpid() + 1),
        "LISTEN_FDS": "2",
        "LISTEN_FDNAMES": "a:b",
        "HOME": "/root",
    }
    made = ServiceManager(environment)
    assert environment == {"HOME": "/root"}
    # They are for another process.
    assert made.passed == {}
    assert made.variables == {"NOTIFY_SOCKET": "/run/systemd/notify"}
