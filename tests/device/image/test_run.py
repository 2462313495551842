"""``btrfs-ublk image run``: a command in a fork of an image, as the image says."""

import io
import os
import pty
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.containers import BUSYBOX
from support.images import tagged_image
from support.needs import Need
from support.volumes import NAME, TIMEOUT_S, Place, image_place

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT, Helper
from btrfs_ublk.base.helpers import MKIMAGE
from btrfs_ublk.base.private_dirs import VOLUMES_VARIABLE
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.pull import inspect_image
from btrfs_ublk.image.reference import parse_name
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.volume import down_volume, forks_of_image, list_volumes, up_volume

pytestmark = pytest.mark.data

LINKS = {
    **{f"bin/{x}": "busybox" for x in "sh id cat sleep mount stty tty ls env".split()},
    # An image must not lead out of itself, to what the machine has.
    "dev": "/srv/devices",
    "etc/resolv.conf": "../run/resolver/resolv.conf",
}
TEXTS = {
    "etc/passwd": "other:x:1000:1001::/home/other:/bin/sh\n",
    "etc/group": "other:x:1001:\nmore:x:7:a,other\n",
    "etc/motd": "hello\n",
    "srv/devices/of-the-image": "",
    "bin/no-program": "",
}
CONFIG = {
    "Env": ["GREETING=hello=you", "PATH=/bin"],
    "Entrypoint": ["sh", "-c"],
    "Cmd": ["echo $GREETING; pwd; id -u; id -G; echo $HOME; exit 3"],
    "WorkingDir": "/srv/work",
    "User": "other",
}


def image_of(place: Place, **config: object) -> str:
    """Make a sealed image of a shell, with this config; return its name."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        tar.add("/bin/busybox", "bin/busybox", filter=_of_root)
        for name, target in LINKS.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        for name, text in TEXTS.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    source = tagged_image(place.root / "source", made.getvalue(), config=config)
    built = build_image(source, place.root / "app", BuildOptions())
    return str(built.name)


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.type, member.mode = tarfile.REGTYPE, 0o755
    return member


@pytest.fixture
def place(
    need: Need,
    sparse_path: Path,
    front_end: FrontEndName,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Place]:
    need(ROOT, BTRFS, LOOP, BUSYBOX, Helper(MKIMAGE))
    found = image_place(sparse_path, monkeypatch, front_end)
    yield found
    found.take_all_down()


@pytest.fixture(scope="module")
def served(
    need: Need, front_end: FrontEndName, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Place, str]]:
    """A volume that stays up, and its image.

    NB: two volumes of one image cannot be up. Tests with one of their own come first.
    """
    need(ROOT, BTRFS, LOOP, BUSYBOX, Helper(MKIMAGE))
    with pytest.MonkeyPatch.context() as patch:
        found = image_place(tmp_path_factory.mktemp("run"), patch, front_end)
        image = image_of(found)
        up_volume(NAME, found.definition(image=image), base=found.base)
        yield found, image
        found.take_all_down()


def made(place: Place, **config: object) -> str:
    """Make an image, and a volume of it that is down; return the image's name."""
    image = image_of(place, **config)
    up_volume(NAME, place.definition(image=image), base=place.base)
    down_volume(NAME, base=place.base)
    return image


def run(place: Place, *words: object) -> subprocess.CompletedProcess[str]:
    return place.command("run", *words, noun="image")


def shell(place: Place, image: str, script: str, *options: str) -> str:
    done = run(place, image, *options, "--", "/bin/sh", "-c", script)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def started(place: Place, image: str, script: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script that prints "ready"."""
    words = [sys.executable, "-m", "btrfs_ublk.cli.main", "image", "run", image, "--"]
    with subprocess.Popen(
        [*words, "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {VOLUMES_VARIABLE: str(place.base)},
    ) as command:
        assert command.stdout is not None and command.stdout.readline() == "ready\n"
        yield command


def states(place: Place) -> dict[str, str]:
    return {each.name: each.state for each in list_volumes(base=place.base)}


def test_what_a_command_reads_comes_first(place: Place) -> None:
    image_of(place)
    words = (f"oci:{place.root}/source", "--output", place.root / "traced")
    done = place.command("build", *words, "--trace-run", "sh -c 'exit 4'", noun="image")
    assert done.returncode == 1 and "ends with exit status 4" in done.stderr
    done = place.command(
        "build", *words, "--trace-run", "sh -c 'cat /etc/motd'", noun="image"
    )
    assert done.returncode == 0, done.stderr
    found = inspect_image(parse_name(f"oci:{place.root}/traced"), RegistryAccess())
    assert 0 < found.header.first_bytes <= found.header.data_bytes
    assert not states(place)


def test_the_command_of_the_image(place: Place) -> None:
    image = made(place, **CONFIG)
    done = run(place, image)
    expected = "hello=you\n/srv/work\n1000\n1001 7\n/home/other\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, expected, "")
    assert states(place) == {NAME: "down"}
    words = ("env", "GREETING=again", "sh", "-c", "echo $GREETING; exit 5")
    done = run(place, image, "--", *words)
    assert (done.returncode, done.stdout, done.stderr) == (5, "again\n", "")


def test_a_fork_is_dropped_unless_it_has_a_name(place: Place) -> None:
    image = made(place)
    assert shell(place, image, "echo mine > /etc/motd; cat /etc/motd") == "mine\n"
    shell(place, image, "cat /etc/motd; echo kept > /etc/motd", "--fork=one")
    assert states(place) == {NAME: "down"}
    up = place.command("up", image, NAME, "--fork=one", noun="image")
    assert (up.returncode, up.stdout) == (0, f"{place.target}/forks/one\n"), up.stderr
    assert (place.target / "forks/one/etc/motd").read_text() == "kept\n"
    assert shell(place, image, "cat /etc/motd") == "hello\n"
    assert [x.name for x in forks_of_image(NAME, base=place.base)] == ["one"]
    assert states(place) == {NAME: "up"}  # it was before


def test_it_stays_up_while_others_use_it(place: Place) -> None:
    image = made(place)
    with started(place, image, "echo ready; exec cat") as first:
        assert shell(place, image, "cat /etc/motd") == "hello\n"
        assert states(place) == {NAME: "up"}
        first.communicate(timeout=TIMEOUT_S)
        assert first.returncode == 0
    assert states(place) == {NAME: "down"}


def test_signals_are_passed_on(served: tuple[Place, str]) -> None:
    place, image = served
    trap = "trap 'exit 7' TERM INT; echo ready; while :; do sleep 0.1; done"
    for number, script, expected in (
        (signal.SIGTERM, trap, 7),
        (signal.SIGINT, trap, 7),
        (signal.SIGUSR1, "echo ready; exec sleep 99", 128 + signal.SIGUSR1),
    ):
        with started(place, image, script) as command:
            command.send_signal(number)
            said = command.communicate(timeout=TIMEOUT_S)
        assert (command.returncode, said) == (expected, ("", ""))
    assert forks_of_image(NAME, base=place.base) == []


def test_it_has_the_terminal(served: tuple[Place, str]) -> None:
    """It knows its name, and Ctrl-C there reaches it once."""
    place, image = served
    script = "trap 'echo once; exit 6' INT; tty; echo ready; "
    script += "while :; do sleep 0.1; done"
    environment = os.environ | {VOLUMES_VARIABLE: str(place.base)}
    words = ["-m", "btrfs_ublk.cli.main", "image", "run", image, "--"]
    words = [sys.executable, *words, "sh", "-c", script]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, words, environment)
    said = b""
    try:
        while b"ready" not in said:
            said += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        while True:
            said += os.read(terminal, 1000)
    except OSError:  # it has ended
        pass
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(terminal)
    assert status == 6, said
    assert b"/dev/pts/" in said and said.count(b"once") == 1


def test_what_cannot_be_run(served: tuple[Place, str]) -> None:
    place, image = served
    nothing = run(place, image)
    assert nothing.returncode == 2 and "says no command to run" in nothing.stderr
    missing = run(place, image, "--", "no-such")
    assert missing.returncode == 127
    assert "error: the image has no program 'no-such'" in missing.stderr
    refused = run(place, image, "--", "/bin/no-program")
    assert refused.returncode == 126
    assert "cannot execute '/bin/no-program': Permission denied" in refused.stderr
    assert forks_of_image(NAME, base=place.base) == []


def test_what_there_is_in_the_root(served: tuple[Place, str]) -> None:
    place, image = served
    script = "id -u; pwd; cat /etc/motd; echo gone > /dev/null; cat /dev/fd/0"
    script += " < /proc/1/comm > /dev/null; cat /etc/resolv.conf"
    resolver = Path("/etc/resolv.conf").read_text()
    assert shell(place, image, script) == f"0\n/\nhello\n{resolver}"
    devices = shell(place, image, "cd /dev && ls").split()
    nodes = {"null", "zero", "full", "random", "urandom", "tty", "pts"}
    assert nodes <= set(devices) and "of-the-image" not in devices
    refused = run(place, image, "--", "sh", "-c", "echo 1 > /sys/kernel/profiling")
    assert refused.returncode == 1 and "Read-only file system" in refused.stderr
    shown = [line.split()[2] for line in shell(place, image, "mount").splitlines()]
    expected = ["/", "/proc", "/sys", "/srv/devices", "/run/resolver/resolv.conf"]
    assert shown == [*expected, "/srv/devices/pts"]
    assert not Path("/srv/devices").exists()
