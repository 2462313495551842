"""scripts/vm and scripts/isolate: arguments, streams, exit statuses, clean ends."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import Need
from support.paths import PROJECT
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import ROOT
from btrfs_ublk.kernel.mount import mounted

VM = PROJECT / "scripts/vm"
ISOLATE = PROJECT / "scripts/isolate"

sys.path.insert(0, str(PROJECT / "scripts/lib"))
from vmlib import children, command, streams  # noqa: E402

needs_root = pytest.mark.usefixtures("root")


@pytest.fixture
def root(need: Need) -> None:
    need(ROOT)


def run(*argv: object, **options: object) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [str(word) for word in argv], capture_output=True, timeout=120, **options
    )


# --- scripts/vm without a guest


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--cpus", "0", "--", "true"],
        ["--memory", "2", "--", "true"],
        ["--timeout", "0", "--", "true"],
        ["--icount", "--cpus", "2", "--", "true"],
        ["--icount", "--accel", "kvm", "--", "true"],
        ["--arch", "arm64", "--accel", "kvm", "--", "true"],
        ["--arch", "arm64", "--pmem", "64M", "--", "true"],
        ["--env", "A-B=1", "--", "true"],
        ["--unknown", "--", "true"],
    ],
)
def test_vm_refuses_bad_arguments(arguments: list[str]) -> None:
    done = run(VM, *arguments)
    assert done.returncode == 2
    assert b"scripts/vm: error:" in done.stderr
    assert done.stdout == b""


def test_the_commands_words_reach_the_shell_unchanged(tmp_path: Path) -> None:
    odd = ["", "a b", "'", '"', "$HOME", "`id`", "\\", "new\nline", "ä", "-n", "*"]
    show = "import sys; print(ascii(sys.argv[1:]))"
    script = command.command_script(
        [sys.executable, "-c", show, *odd], {"A": "x'y"}, cwd="/", project=tmp_path
    )
    done = run("sh", "-c", script.decode())
    assert done.stdout.decode().strip() == ascii(odd)


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_the_end_mark_is_found_however_it_is_cut(step: int) -> None:
    data = b"abMMabM" + b"MARK" + b"after"
    flow = streams.FromGuest(-1, -1, b"MARK")
    seen = b""
    for start in range(0, len(data), step):
        if not flow.finished:
            seen += flow.received(data[start : start + step])
    assert seen == b"abMMabM"
    assert flow.marked


@pytest.mark.device
def test_a_guest_holds_no_mount_of_tests(need: Need, sparse_path: Path) -> None:
    """Else nobody could unmount it for good, or detach its device, until the guest's
    end; sparse_path is in a directory as tests have it.
    """
    need(ROOT)
    target = sparse_path / "mnt"
    target.mkdir()
    with (
        mounted("none", target, fs_type="tmpfs"),
        (sparse_path / "log").open("wb") as log,
    ):
        prepare = children.see_everything_read_only
        child = children.spawn(
            ["cat", "/proc/self/mountinfo"], log=log.fileno(), prepare=prepare
        )
        assert child.wait(60) == 0
        assert str(target) in Path("/proc/self/mountinfo").read_text()
    seen = (sparse_path / "log").read_text()
    assert str(target) not in seen and " / / " in seen


# --- scripts/vm with a guest: one boot does all it can


_IN_GUEST = r"""
set -u
uname -r
id -u
pwd
modprobe ublk_drv && test -c /dev/ublk-control && echo ublk
for fs in /tmp /dev/shm; do
    truncate -s 4E $fs/sparse && stat -c %s $fs/sparse && rm $fs/sparse
done
cat /sys/class/net/lo/flags # IFF_UP and IFF_LOOPBACK
touch /usr/only-in-the-guest && echo overlay
echo "$BTRFS_UBLK_TEST_WORD"
cat "/run/host$2"
touch "/run/host$2" 2>/dev/null || echo read-only
cat >"$1/from-stdin"
head -c 1000000 /dev/zero | tr '\0' '\377'
echo talk >&2
exit 7
"""


@pytest.mark.vm
@needs_root
def test_vm_runs_a_command(shared_dir: Path) -> None:
    data = bytes(range(256)) * 5000
    hidden = Path("/tmp") / shared_dir.name  # the guest has a /tmp of its own
    hidden.write_text("host's\n")
    done = subprocess.run(
        [VM, "--timeout", "100", "--", "sh", "-c", _IN_GUEST, "sh", shared_dir, hidden],
        input=data,
        capture_output=True,
        timeout=200,
        check=False,
        cwd="/usr/share",
        env={**os.environ, "BTRFS_UBLK_TEST_WORD": "a 'word'"},
    )
    hidden.unlink()
    *tries, said = done.stderr.splitlines()
    # An emulated kernel panics now and then while it boots, and is booted again.
    assert all(line.endswith(b"while it booted; trying again") for line in tries)
    assert said == b"talk"
    assert done.returncode == 7
    lines, binary = done.stdout[:-1000000], done.stdout[-1000000:]
    assert binary == b"\377" * 1000000
    release, *rest = lines.decode().splitlines()
    assert release[0].isdigit()
    assert rest == [
        *("0", "/usr/share", "ublk", str(1 << 62), str(1 << 62)),
        *("0x9", "overlay", "a 'word'", "host's", "read-only"),
    ]
    assert not Path("/usr/only-in-the-guest").exists()
    written = (shared_dir / "from-stdin").read_bytes()
    assert hashlib.sha256(written).digest() == hashlib.sha256(data).digest()


@pytest.fixture
def shared_dir() -> Iterator[Path]:
    """A directory within the project, as only that is shared with the guest."""
    path = PROJECT / "build" / f"test-scripts-{os.getpid()}"
    path.mkdir(parents=True)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


# --- scripts/isolate


@needs_root
@pytest.mark.parametrize(
    ("script", "status"), [("exit 9", 9), ("kill -KILL $$", 137), ("exit 0", 0)]
)
def test_isolate_passes_the_exit_status_on(script: str, status: int) -> None:
    assert run(ISOLATE, "sh", "-c", script).returncode == status


@needs_root
def test_isolate_hides_mounts_and_processes(tmp_path: Path) -> None:
    script = f"mount -t tmpfs tmpfs {tmp_path}; touch {tmp_path}/x; ls -d /proc/[0-9]*"
    done = run(ISOLATE, "sh", "-c", script)
    assert done.returncode == 0
    assert {int(line.rsplit(b"/")[-1]) for line in done.stdout.split()} <= {1, 2, 3, 4}
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_isolate_forwards_signals() -> None:
    script = "trap 'exit 4' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(
        [ISOLATE, "sh", "-c", script], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 4


@needs_root
@pytest.mark.parametrize("end", ["by itself", "killed"])
def test_isolate_leaves_no_process_behind(end: str) -> None:
    marker = f"{300_000_000 + os.getpid()}"  # recognised in /proc by its argument
    script = (
        f"setsid sleep {marker} & echo ready; {'' if end == 'by itself' else 'wait'}"
    )
    with subprocess.Popen(
        [ISOLATE, "sh", "-c", script], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if end == "killed":
            process.kill()
        process.wait(60)
    # The kernel ends the namespace asynchronously.
    wait_until(lambda: not _processes_with(marker), lambda: _processes_with(marker))


def _processes_with(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:  # it ended meanwhile
            pass
    return found
