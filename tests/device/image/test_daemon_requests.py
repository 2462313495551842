"""Requests about volumes to the daemon, by its socket, and the program that asks it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices import kill
from support.paths import PROJECT
from support.volumes import NAME, Place

from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.device import show_device
from btrfs_ublk.supervision.client import DaemonDirectory
from btrfs_ublk.volume import forks_of_image
from btrfs_ublk.volume.store import VOLUMES_VARIABLE

TIMEOUT_S = 60
#: It changes at any time.
_USED = re.compile(r"[\d.]+ MiB|(?<=used_bytes\": )\d+")
_C = re.compile(r"^```c\n(.*?)^```", re.M | re.S)


@pytest.fixture(scope="module", autouse=True)
def _volumes(layout: Path) -> Iterator[None]:
    """The daemon's default is what the command has that starts it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VOLUMES_VARIABLE, str(layout.parent / "volumes"))
        yield


@pytest.fixture
def place(shared: Place) -> Place:
    """It is up for all tests of this file."""
    return shared


def ask(request: object) -> dict[str, Any]:
    """As another program does, which does not know this package."""
    message = request if isinstance(request, bytes) else json.dumps(request).encode()
    with DaemonDirectory.of_host().connected() as connection:
        connection.settimeout(TIMEOUT_S)
        connection.send(message)
        parts = []
        while part := connection.recv(8192):
            parts.append(part)
    reply: dict[str, Any] = json.loads(b"".join(parts))
    return reply


def program(*words: str, module: str = "command", **more: Any) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", f"btrfs_ublk.{module}", *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        **more,
    )
    return done.returncode, done.stdout, done.stderr


def processes() -> list[ProcessIdentity]:
    """Those that answer for our daemon."""
    found = show_device(NAME).state.supervisor
    assert found is not None
    path = Path(f"/proc/{found.pid}/task")
    children = " ".join(x.read_text() for x in path.glob("*/children")).split()
    return [
        ProcessIdentity.of(int(pid))
        for pid in children
        if b"btrfs_ublk.volume.answers" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_forks_are_made_listed_and_dropped(place: Place) -> None:
    made = [
        ask({"request": "fork", "volume": NAME, "fork": name, "mode": name})
        for name in ("overlay", "snapshot")
    ]
    for keys in made:
        path = Path(keys["path"])
        assert path == place.target / "forks" / keys["fork"] and keys["name"] == NAME
        (path / "etc/motd").write_text("changed")
    found = ask({"request": "forks", "volume": NAME})["forks"]
    assert found == [x.to_dict() for x in forks_of_image(NAME, base=place.base)]
    assert [x["name"] for x in found] == ["overlay", "snapshot"]
    for name in ("overlay", "snapshot"):
        assert "error" not in ask({"request": "drop", "volume": NAME, "fork": name})
    assert forks_of_image(NAME, base=place.base) == []


@pytest.mark.parametrize(
    ("keys", "error", "status"),
    [
        (b"{", "no request", 2),
        (b"[" * 60000, "no request", 2),
        (b"x" * 70000, "more than 65536 bytes", 2),
        ({"request": "fork", "volume": NAME}, "needs the key 'fork'", 2),
        ({"request": "fork", "volume": NAME, "fork": 7}, "fork cannot be 7", 2),
        ({"request": "fork", "volume": NAME, "fork": "a/b"}, "cannot be the name", 2),
        ({"request": "fork", "volume": "no", "fork": "one"}, "there is no volume", 2),
        ({"request": "drop", "volume": NAME, "fork": "no"}, "there is no fork", 2),
        ({"request": "list", "quota": "1"}, "has no key 'quota'", 2),
        ({"request": "list", "base": "volumes"}, "is not absolute", 2),
        ({"request": "list", "namespace": "mnt:[1]"}, "another mount namespace", 2),
        ({"request": "snapshot", "volume": NAME, "snapshot": "x"}, "has forks", 2),
    ],
)
def test_wrong_requests(place: Place, keys: object, error: str, status: int) -> None:
    reply = ask(keys)
    assert error in reply["error"] and reply["exit_status"] == status
    assert ask({"request": "list"})["volumes"][0]["state"] == "up"


def test_many_at_once(place: Place) -> None:
    """They take turns at the volume, and none is lost."""
    names = [f"fork-{number}" for number in range(40)]
    replies: list[dict[str, Any]] = []

    def make(name: str) -> None:
        replies.append(ask({"request": "fork", "volume": NAME, "fork": name}))

    threads = [threading.Thread(target=make, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(x["fork"] for x in replies) == sorted(names)
    assert len(forks_of_image(NAME, base=place.base)) == len(names)
    assert len(processes()) == 1


@pytest.mark.parametrize(
    "words",
    [
        "volume list",
        "volume list --json",
        f"volume status {NAME}",
        f"volume status {NAME} --json",
        "volume status none",
        f"image forks {NAME}",
        f"image forks {NAME} --json",
        f"image fork {NAME} here",
        "image fork none one --json",
        f"image fork {NAME} .. --mode snapshot",
        f"image fork {NAME} one --mode wrong",
    ],
)
@pytest.mark.parametrize("is_ready", [True, False])
def test_the_program_says_what_the_commands_say(
    place: Place, words: str, is_ready: bool
) -> None:
    """It asks the daemon, or itself, and they look for themselves."""
    ask({"request": "fork", "volume": NAME, "fork": "here"})
    for process in [] if is_ready else processes():
        kill(process, signal.SIGKILL)
        assert process.wait(timeout_s=TIMEOUT_S)
    one, other = (
        [
            _USED.sub("some", str(each))
            for each in program(*words.split(), module=module)
        ]
        for module in ("command", "cli.main")
    )
    assert one == other
    assert one[1] or one[0] != "0"


def test_the_program_makes_forks(place: Place) -> None:
    for mode in ("overlay", "snapshot"):
        words = ["image", "fork", NAME, mode, "--mode", mode, "--json"]
        status, output, _ = program(*words)
        path = str(place.target / "forks" / mode)
        keys = {"name": NAME, "fork": mode, "path": path, "mode": mode}
        assert (status, json.loads(output)) == (0, keys)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "btrfs_ublk.command", "volume", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 1 and b"No space left on device" in done.stderr


def test_what_answers_may_die_or_hang(place: Place) -> None:
    """The next request starts another one, or the second one that would do without; the
    daemon and its devices notice nothing. The program has a stopped daemon go on."""
    ask({"request": "list"})
    before = show_device(NAME).state
    (process,) = processes()
    kill(process, signal.SIGKILL)
    assert process.wait(timeout_s=TIMEOUT_S)
    answers = [ask({"request": "list", "if_ready": True}) for _ in range(3)]
    assert "not_ready" in answers[0] and "volumes" in answers[2]
    (process,) = processes()
    kill(process, signal.SIGKILL)
    assert process.wait(timeout_s=TIMEOUT_S)
    assert ask({"request": "list"})["volumes"][0]["state"] == "up"
    (process,) = processes()
    kill(process, signal.SIGSTOP)
    replies: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: replies.append(ask({"request": "list"})))
    thread.start()
    assert "'directory'" in ask({"request": "release"})["error"]  # it answers others
    assert show_device(NAME).state == before and not replies
    kill(process, signal.SIGCONT)
    thread.join(TIMEOUT_S)
    assert replies[0]["volumes"]
    assert before.supervisor is not None
    kill(before.supervisor, signal.SIGSTOP)
    status, output, _ = program("volume", "list")
    assert status == 0 and " up " in output


def test_other_users_ask_of_volumes_only(place: Place) -> None:
    """And only if the modes of the socket and its directories let them."""
    path = DaemonDirectory.of_host().path
    modes = {each: each.stat().st_mode for each in (path.parent, path, path / "socket")}

    def ask_as_other(request: dict[str, str]) -> dict[str, Any]:
        read_fd, write_fd = os.pipe()
        if not (child := os.fork()):
            try:
                os.chdir(path)
                os.setgroups([])
                os.setresuid(65534, 65534, 65534)
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
                    other.connect("socket")
                    other.send(json.dumps(request).encode())
                    while part := other.recv(8192):
                        os.write(write_fd, part)
            finally:
                os._exit(0)
        os.close(write_fd)
        with open(read_fd) as file:
            reply: dict[str, Any] = json.load(file)
        os.waitpid(child, 0)
        return reply

    try:
        for each in modes:
            each.chmod(0o777 if each.name == "socket" else 0o711)
        assert ask_as_other({"request": "list"})["volumes"]
        for refused in (
            {"request": "list", "base": "/tmp"},
            {"request": "replace", "directory": "/", "python": "/bin/true"},
        ):
            assert "user 65534 may not ask" in ask_as_other(refused)["error"]
    finally:
        for each, mode in modes.items():
            each.chmod(mode & 0o7777)


def test_the_example_in_c(place: Place, tmp_path: Path) -> None:
    (text,) = _C.findall((PROJECT / "docs/how-to/sandboxes.md").read_text())
    path = f"{DaemonDirectory.of_host().path}/socket"
    source, ask_ = tmp_path / "ask.c", tmp_path / "ask"
    source.write_text(text.replace("/run/btrfs-ublk/daemon/socket", path))
    subprocess.run(["cc", "-Wall", "-Werror", source, "-o", ask_], check=True)
    request = json.dumps({"request": "fork", "volume": NAME, "fork": "one"})
    said = subprocess.run([ask_, request], check=True, stdout=subprocess.PIPE).stdout
    assert json.loads(said)["path"] == str(place.target / "forks/one")


def test_a_client_that_goes_stops_nobody(place: Place) -> None:
    with DaemonDirectory.of_host().connected() as connection:
        connection.send(json.dumps({"request": "list"}).encode())
    with DaemonDirectory.of_host().connected() as silent:
        assert ask({"request": "list"})["volumes"]
        silent.shutdown(socket.SHUT_WR)
        silent.settimeout(TIMEOUT_S)
        assert silent.recv(10) == b""
