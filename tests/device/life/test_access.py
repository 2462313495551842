"""Who may do what to which socket and file: as docs/design/threat-model.md says.

Strangers get descriptors (O_PATH) of all that a running volume has, so that no closed
directory above it answers for an open file below: each has to refuse on its own.
"""

import ctypes
import json
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.attacker import _CLONE_NEWNS, _CLONE_NEWUSER, _LIBC, UID
from support.needs import Need
from support.processes import REPLY_TIMEOUT_S
from support.volumes import NAME, Place
from support.web_servers import web_server

from btrfs_ublk.base.capabilities import FUSE
from btrfs_ublk.device import show_device
from btrfs_ublk.device.state import RUN_VARIABLE, device_directory
from btrfs_ublk.volume import VolumeFile, kept_volume

pytestmark = pytest.mark.fuse

#: All that docs/design/protocol.md lists.
VERBS = [
    *("stats", "info", "stop", "handover"),
    *("map-add", "map-look-up", "map-list", "map-show", "map-verify", "map-stats"),
    *("map-sources", "prefetch-start", "prefetch-status"),
    *("prefetch-cancel", "trace-start", "trace-read"),
]


def _become(uid: int, gid: int, groups: list[int]) -> None:
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    # What has changed its user may not open its own /proc/self/fd otherwise (prctl(2)).
    _LIBC.prctl(4, 1, 0, 0, 0)


def _other() -> None:
    _become(UID, UID, [])


def _group_member() -> None:
    _become(UID, 0, [0])


def _root_of_namespace() -> None:
    _other()
    if _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        os._exit(77)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {UID} 1")
    Path("/proc/self/gid_map").write_text(f"0 {UID} 1")
    assert os.geteuid() == 0


STRANGERS = [_other, _group_member, _root_of_namespace]


def told_by(become: Callable[[], object], act: Callable[[], list[str]]) -> list[str]:
    """Return what a child of another identity returns."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            become()
            os.write(writer, json.dumps(act()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as file:
        said = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 77:
        pytest.skip("other users may not make user namespaces here")
    assert status == 0
    found: list[str] = json.loads(said)
    return found


@pytest.fixture(scope="module")
def served(need: Need, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    need(FUSE)
    root = tmp_path_factory.mktemp("access")
    place = Place(root, "fuse")
    with web_server(root / "web") as server:
        (server.files / "two").write_bytes(bytes(5000))
        definition = place.definition("one", cache=root / "cache")
        file = VolumeFile.parse(f"two={server.url('files/two')}")
        files = (*definition.files, file)
        with kept_volume(NAME, replace(definition, files=files), base=place.base):
            yield place


@pytest.fixture
def place(served: Place) -> Iterator[Place]:
    """Whatever strangers do, nobody harms it."""
    assert served.matches("one")
    assert (served.target / "two").read_bytes() == bytes(5000)
    yield served
    assert show_device(NAME).is_well and served.matches("one")


def all_of(place: Place) -> list[Path]:
    tops = [place.base, place.root / "cache", Path(os.environ[RUN_VARIABLE])]
    tops.append(Path(os.environ["BTRFS_UBLK_STATE_DIR"]))
    return [path for top in tops for path in (top, *sorted(top.rglob("*")))]


def _allowed(path: Path, fd: int) -> list[str]:
    """Return what this process may do to a file, of which it has a descriptor."""
    name = f"/proc/self/fd/{fd}"
    mode = os.fstat(fd).st_mode
    tries: dict[str, Callable[[], object]] = {}
    if stat.S_ISDIR(mode):
        tries = {
            "list": lambda: os.listdir(name),
            "create in": lambda: os.mkdir("new", dir_fd=fd),
            "mount over": lambda: _mount_over(name),
        }
    elif stat.S_ISSOCK(mode):
        tries = {"connect to": lambda: _connect(name)}
    elif stat.S_ISREG(mode):
        tries = {
            "read": lambda: os.close(os.open(name, os.O_RDONLY)),
            "write": lambda: os.close(os.open(name, os.O_WRONLY)),
            "link": lambda: os.link(name, "/dev/shm/btrfs-ublk-link"),
        }
    tries["change the mode of"] = lambda: os.chmod(name, stat.S_IMODE(mode))
    found = []
    for what, attempt in tries.items():
        with suppress(OSError):
            attempt()
            found.append(f"{what} {path}")
    return found


def _mount_over(name: str) -> None:
    if _LIBC.mount(b"none", name.encode(), b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "mount")


def _connect(name: str) -> None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as connection, suppress(OSError):
            connection.connect(name)
            return
    raise PermissionError(name)


def test_files_and_sockets(place: Place) -> None:
    with ExitStack() as stack:
        fds = {}
        for path in all_of(place):
            with suppress(FileNotFoundError):  # It was a daemon's, for a moment.
                fd = os.open(path, os.O_PATH | os.O_NOFOLLOW)
                stack.callback(os.close, fd)
                fds[path] = fd
        kinds = {stat.S_IFMT(os.fstat(fd).st_mode) for fd in fds.values()}
        assert {stat.S_IFDIR, stat.S_IFREG, stat.S_IFSOCK} <= kinds

        def act() -> list[str]:
            return [each for path, fd in fds.items() for each in _allowed(path, fd)]

        for become in STRANGERS:
            assert told_by(become, act) == [], become


def test_verbs(place: Place) -> None:
    """The server itself asks who it is, even where its socket is open to all."""
    path = device_directory(NAME).path / "control"
    before = stat.S_IMODE(path.stat().st_mode)
    fd = os.open(path, os.O_PATH)

    def act() -> list[str]:
        replies = []
        for verb in VERBS:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(REPLY_TIMEOUT_S)
                connection.connect(f"/proc/self/fd/{fd}")
                with suppress(BrokenPipeError):
                    connection.sendall(json.dumps({"request": verb}).encode() + b"\n")
                # Read on after ECONNRESET: the server did not read what we said.
                data = b""
                for _ in range(20):
                    with suppress(ConnectionResetError):
                        if not (more := connection.recv(4096)):
                            break
                        data += more
                replies.append(data.decode())
        return replies

    refusal = {"error": "only root and user 0 may ask this server"}
    try:
        path.chmod(0o777)
        for become in STRANGERS:
            replies = [json.loads(line) for line in told_by(become, act)]
            assert replies == [refusal] * len(VERBS), become
    finally:
        path.chmod(before)
        os.close(fd)


def _processes_of(place: Place) -> dict[int, str]:
    """Return pids and names of all that works for the volume, also of what asks
    servers."""
    state = show_device(NAME).state
    assert state.server is not None and state.supervisor is not None
    found = {state.server.pid: "server", state.supervisor.pid: "daemon"}
    found |= {keeper.process.pid: "keeper" for keeper in state.keepers}
    children = Path(f"/proc/{state.server.pid}/task")
    for each in children.glob("*/children"):
        found |= {int(pid): "fetch process" for pid in each.read_text().split()}
    return found


def _first_byte(path: Path) -> int:
    with path.open("rb") as file:
        return file.read(1)[0]


def _looked_into(pid: int) -> list[str]:
    """Return what of a process this one can look into, or change."""
    top = Path(f"/proc/{pid}")
    tries: dict[str, Callable[[], object]] = {
        "fd": lambda: os.listdir(top / "fd"),
        "fdinfo": lambda: os.listdir(top / "fdinfo"),
        "map_files": lambda: os.listdir(top / "map_files"),
        "root": lambda: os.listdir(top / "root"),
        "cwd": lambda: os.listdir(top / "cwd"),
        "exe": lambda: os.readlink(top / "exe"),
        "an open file": lambda: os.stat(top / "fd/0"),
        "its namespace": lambda: os.readlink(top / "ns/mnt"),
        "write oom_score_adj": lambda: (top / "oom_score_adj").write_text("1000"),
        "signal": lambda: os.kill(pid, signal.SIGCONT),
        **{
            name: partial(_first_byte, top / name)
            for name in ("environ", "mem", "maps", "stack", "auxv", "syscall", "io")
        },
    }
    found = []
    for what, attempt in tries.items():
        with suppress(OSError, IndexError):
            attempt()
            found.append(f"{what} of {pid}")
    return found


def test_processes(place: Place) -> None:
    """By way of /proc/PID, nobody gets at what a process of ours has: not even who has
    the user of the process that asks servers."""
    processes = _processes_of(place)
    kinds = {"server", "daemon", "keeper", "fetch process"}
    assert set(processes.values()) == kinds

    def act() -> list[str]:
        return [each for pid in processes for each in _looked_into(pid)]

    # All of these have its user, and the kernel lets them signal it. The server starts
    # another one.
    (fetching,) = [pid for pid, what in processes.items() if "fetch" in what]
    for become in STRANGERS:
        assert told_by(become, act) == [f"signal of {fetching}"], become
    # Root may, so the tries can fail.
    assert len(_looked_into(max(processes))) > 5


def test_root_may(place: Place) -> None:
    """What the tests above try works where it is allowed, so they can fail."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REPLY_TIMEOUT_S)
        connection.connect(str(device_directory(NAME).path / "control"))
        with connection.makefile("rb") as file:
            connection.sendall(b'{"request": "bla"}\n')
            known = json.loads(file.readline())["error"].partition("known: ")[2]
            assert sorted(known.split(", ")) == sorted(VERBS)
    path = device_directory(NAME).path / "state.json"
    fd = os.open(path, os.O_PATH)
    try:
        expected = [
            f"{what} {path}" for what in ("read", "write", "change the mode of")
        ]
        assert [x for x in _allowed(path, fd) if not x.startswith("link")] == expected
    finally:
        os.close(fd)
