"""scripts/vm and scripts/isolate: arguments, streams, exit statuses, clean ends."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import Need
from support.paths import PROJECT
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import MOUNT, ROOT
from btrfs_ublk.kernel.mount import mounted

VM = PROJECT / "scripts/vm"
ISOLATE = PROJECT / "scripts/isolate"

sys.path.insert(0, str(PROJECT / "scripts/lib"))
from vmlib import accel, cache, children, command, kernel, streams  # noqa: E402
from vmlib.errors import VmError  # noqa: E402

needs_root = pytest.mark.usefixtures("root")


@pytest.fixture
def root(need: Need) -> None:
    need(ROOT)


def run(*argv: object, **options: object) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [str(word) for word in argv], capture_output=True, timeout=120, **options
    )


# --- scripts/vm without a guest


def test_a_failure_of_kvm_counts_for_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may only have been busy; what has booted once is known for ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: True)
    boots = [False, True]
    monkeypatch.setattr(accel, "_boots", lambda _: boots.pop(0))
    linux = kernel.Kernel(
        image=tmp_path / "vmlinuz", release="6.1.0-test", modules_base=None
    )
    assert not accel.kvm_works(linux)
    assert not accel.kvm_works(linux) and boots == [True]
    (verdict,) = (tmp_path / "btrfs-ublk").glob("kvm-*.json")
    hours_ago = time.time() - 2 * 3600
    os.utime(verdict, (hours_ago, hours_ago))
    assert accel.kvm_works(linux) and not boots
    os.utime(verdict, (hours_ago, hours_ago))
    assert accel.kvm_works(linux)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--"],
        ["--kernel"],
        ["--cpus", "0", "--", "true"],
        ["--cpus", "two", "--", "true"],
        ["--memory", "2", "--", "true"],
        ["--memory", "-1G", "--", "true"],
        ["--timeout", "0", "--", "true"],
        ["--timeout", "soon", "--", "true"],
        ["--icount", "--cpus", "2", "--", "true"],
        ["--icount", "--accel", "kvm", "--", "true"],
        ["--arch", "riscv64", "--", "true"],
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


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("5.4", b"neither one of"),
        ("/nonexistent/vmlinuz", b"no such file"),
        ("/etc/passwd", b"not an x86 kernel image"),
    ],
)
def test_vm_refuses_what_is_no_kernel(kernel: str, message: bytes) -> None:
    done = run(VM, "--kernel", kernel, "--", "true")
    assert done.returncode == 125
    assert message in done.stderr
    assert b"Traceback" not in done.stderr


def test_the_commands_words_reach_the_shell_unchanged(tmp_path: Path) -> None:
    odd = ["", "a b", "'", '"', "$HOME", "`id`", "\\", "new\nline", "ä", "-n", "*"]
    show = "import sys; print(ascii(sys.argv[1:]))"
    script = command.command_script(
        [sys.executable, "-c", show, *odd], {"A": "x'y"}, cwd="/", project=tmp_path
    )
    done = run("sh", "-c", script.decode())
    assert done.stdout.decode().strip() == ascii(odd)


def test_only_named_variables_are_passed_on(tmp_path: Path) -> None:
    host = {"BTRFS_UBLK_REQUIRE": "1", "CI": "1", "SECRET": "x", "PATH": "/bin"}
    host["PYTHONDONTWRITEBYTECODE"] = "1"  # an emulated CPU compiles for seconds
    passed = command.guest_environment(host, {"EXTRA": "y"}, tmp_path)
    assert passed["BTRFS_UBLK_REQUIRE"] == passed["CI"] == "1"
    assert passed["PATH"] == "/bin"
    assert passed["BTRFS_UBLK_STATE_DIR"].startswith("/run/")
    assert passed["EXTRA"] == "y"
    assert not {"SECRET", "PYTHONDONTWRITEBYTECODE"} & passed.keys()


def test_a_guest_of_another_architecture_has_other_programs(tmp_path: Path) -> None:
    host = {"PATH": "/bin", "VIRTUAL_ENV": "/venv", "CI": "1"}
    passed = command.guest_environment(host, {}, tmp_path, "arm64")
    assert passed["CI"] == "1"
    assert "VIRTUAL_ENV" not in passed
    assert passed["PATH"] != "/bin"
    assert passed["BTRFS_UBLK_HELPERS"] == f"{tmp_path}/build/arm64/csrc/tools"
    assert passed["BTRFS_UBLK_SANITIZED_BUILD"] == f"{tmp_path}/build/arm64"


def test_there_is_no_guest_before_there_is_a_system_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(VmError, match="scripts/setup --arm64 makes it"):
        kernel.find("latest", arch="arm64")
    with pytest.raises(VmError, match="latest-16k"):
        kernel.find("host", arch="arm64")


def test_python_imports_the_package_without_the_hook_of_its_build() -> None:
    """That alone would take three times as long as Python's start."""
    show = "import sys, btrfs_ublk; print(btrfs_ublk.__file__, *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", show], cwd="/", capture_output=True, text=True
    )
    assert done.stdout.startswith(f"{PROJECT}/btrfs_ublk/__init__.py"), done
    assert "editable_loader" not in done.stdout


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


def test_what_only_begins_like_the_end_mark_is_passed_on() -> None:
    flow = streams.FromGuest(-1, -1, b"MARK")
    assert flow.received(b"xMA") == b"x"
    assert flow.received(b"x") == b"MAx"
    assert not flow.finished


def test_a_kernel_is_called_old_when_nobody_looked_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel.stale_note("latest") is None
    fetched = cache.cache_dir() / "kernels" / "latest"
    fetched.mkdir(parents=True)
    assert kernel.stale_note("latest") is None
    long_ago = time.time() - 20 * 86400
    os.utime(fetched, (long_ago, long_ago))
    assert "20 days ago" in str(kernel.stale_note("latest"))


def test_a_lock_is_waited_for_with_a_word_and_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "_LOCK_LIMIT_S", 0.2)
    with cache.locked("kernels"):
        with pytest.raises(VmError, match="another process"):
            with cache.locked("kernels"):
                pass
    assert "waiting for another" in capfd.readouterr().err
    with cache.locked("kernels"):
        pass


@pytest.mark.parametrize(
    ("argv", "refusal", "message"),
    [
        (["true"], PermissionError(1, "unshare: not permitted"), "unshare: not"),
        (["/nonexistent/virtiofsd"], None, "No such file"),
    ],
)
def test_a_child_that_cannot_be_started_is_one_message(
    argv: list[str], refusal: OSError | None, message: str
) -> None:
    def prepare() -> None:
        if refusal is not None:
            raise refusal

    with open(os.devnull, "wb") as log:
        with pytest.raises(VmError, match=message):
            children.spawn(argv, log=log.fileno(), prepare=prepare)


@pytest.mark.device
def test_a_guest_holds_no_mount_of_tests(need: Need, sparse_path: Path) -> None:
    """Else nobody could unmount it for good, or detach its device, until the guest's
    end; sparse_path is in a directory as tests have it.
    """
    need(ROOT, MOUNT)
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
def test_isolate_says_what_it_cannot_run() -> None:
    done = run(ISOLATE, "no-such-command")
    assert done.returncode == 127
    assert b"no-such-command" in done.stderr
    assert run(ISOLATE).returncode == 2


@needs_root
def test_isolate_leaves_no_signal_ignored() -> None:
    """Without SIGPIPE, what writes to a pipe that nobody reads complains, and fails."""
    done = run(ISOLATE, "grep", "SigIgn", "/proc/self/status")
    # A shell that starts us in the background has us ignore some.
    ours = {x for x in signal.valid_signals() if signal.getsignal(x) == signal.SIG_IGN}
    allowed = sum(1 << (x - 1) for x in ours - {signal.SIGPIPE, signal.SIGXFSZ})
    assert int(done.stdout.split()[1], 16) & ~allowed == 0


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
