"""The fetch process: what it may not do, what it may say, and how it ends."""

import errno
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.fetchers import (
    DATA,
    INQUIRY_LIES,
    LIES,
    PROBE_LIES,
    UNIT,
    program,
    server_of,
    source_of,
)
from support.shells import (
    EngineShell,
    FetchShell,
    VirtualData,
    describe,
    root_of,
    units_of,
)
from support.waiting import wait_until
from support.web_servers import ScriptedServer, scripted_server

from btrfs_ublk.units import MIB

#: What it must be able to do, of what confine-shell tries.
ALLOWED = {"mmap", "open", "socket", "routes", "pair", "thread"} | {
    "/etc/resolv.conf",
    "/etc/passwd",
}
#: With Landlock 4 and later.
OTHER_ERRNO = {
    "local-socket": errno.EAFNOSUPPORT,
    "packets": errno.EPROTONOSUPPORT,
    "other-protocol": errno.EPROTONOSUPPORT,
    "other-netlink": errno.EPROTONOSUPPORT,
    "datagram-pair": errno.EAFNOSUPPORT,
    "io_uring": errno.ENOSYS,
    "write": errno.EACCES,
    "create": errno.EACCES,
    "listen": errno.EACCES,  # to bind is
    "/etc/shadow": errno.EACCES,
    "/proc/self/mem": errno.EACCES,
    "/root": errno.EACCES,
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_it_may_not_do(sanitized_build: Path, tmp_path: Path) -> None:
    secret = tmp_path / "map"
    secret.write_bytes(b"x")
    secret.chmod(0o600)
    files = [
        "/etc/resolv.conf",
        "/etc/passwd",
        "/etc/shadow",
        "/root",
        "/proc/self/mem",
    ]
    done = subprocess.run(
        [sanitized_build / "csrc/tests/confine-shell", "process", *files, secret],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=tmp_path,
        env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert done.returncode == 0, done.stderr
    found = {
        name: int(number) for name, number in map(str.split, done.stdout.splitlines())
    }
    # Without Landlock, DAC alone is what keeps these files from it.
    has_landlock = not found.pop("lacks") & 4
    other = OTHER_ERRNO | {str(secret): errno.EACCES}
    if not has_landlock:
        del other["/proc/self/mem"], other["listen"]
        found.pop("/proc/self/mem")
    assert {name for name, number in found.items() if not number} == ALLOWED
    refused = {name: number for name, number in found.items() if number}
    assert refused == {name: other.get(name, errno.EPERM) for name in refused}
    assert not list(tmp_path.glob("confine-shell*"))


def processes_of(parent: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def process_of(shell: FetchShell) -> int:
    (pid,) = processes_of(shell.pid)
    return pid


def test_it_has_given_all_up(sanitized_build: Path, server: ScriptedServer) -> None:
    with FetchShell(sanitized_build) as shell:
        with suppress(PermissionError):  # it takes CAP_SYS_RESOURCE
            Path(f"/proc/{shell.pid}/oom_score_adj").write_text("-500")
        source = shell.add(source_of(server))
        assert not processes_of(shell.pid)  # nobody has needed it yet
        assert shell.read(source, 0, UNIT).data == DATA[:UNIT]
        pid = process_of(shell)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines)
        stats = shell.stats()["process"]
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) >= 0
    assert stats["started"] == 1 and stats["running"] and not stats["died"]
    assert set(stats["lacks"]) <= {"landlock", "lock"}
    if os.geteuid() == 0:
        assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"65534"}
        assert not status["Groups"].strip()
    assert not int(status["CapEff"], 16) | int(status["CapPrm"], 16)
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert b"PATH=" not in environment and b"HOME=" not in environment
    assert not Path(f"/proc/{pid}").exists()


def probe(shell: FetchShell, source: int, *, timeout_s: float = 20) -> dict[str, Any]:
    return shell.ask(
        {"probe": 1, "source": source, "timeout_ms": round(timeout_s * 1000)}
    )


def test_it_probes(sanitized_build: Path, server: ScriptedServer) -> None:
    """So that the server reads nothing of what is answered. It forgets the mirrors."""
    with FetchShell(sanitized_build) as shell:
        source = shell.add(source_of(server))
        for _ in range(3):
            answer = probe(shell, source)
            assert answer["size"] == len(DATA)
            assert answer["identity"] == 'etag "one"'
        (pid,) = processes_of(shell.pid)
        assert shell.read(source, 0, UNIT).data == DATA[:UNIT]
        assert processes_of(shell.pid) == [pid]
        # The last of its slots is as good as the first.
        os.kill(pid, signal.SIGKILL)
        assert probe(shell, source)["size"] == len(DATA)


def test_local_sources_start_none(sanitized_build: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    mirror = {"kind": "file", "path": str(tmp_path / "file")}
    with FetchShell(sanitized_build) as shell:
        source = shell.add({"size": len(DATA), "mirrors": [mirror]})
        assert shell.read(source, 0, UNIT).data == DATA[:UNIT]
        assert not processes_of(shell.pid)


@pytest.mark.data
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_it_dies_or_hangs_under_reads(
    sanitized_build: Path, server: ScriptedServer, tmp_path: Path, number: int
) -> None:
    log = tmp_path / "log"
    with FetchShell(sanitized_build, log=log) as shell:
        source = shell.add(source_of(server))
        assert shell.read(source, 0, UNIT).data == DATA[:UNIT]
        pid = process_of(shell)
        os.kill(pid, number)
        reads = {n: shell.begin(source, n * UNIT, UNIT) for n in range(1, 9)}
        answers = shell.finish()
        for n, read in reads.items():
            assert answers[read].data == DATA[n * UNIT :][:UNIT]
        stats = shell.stats()["process"]
        assert stats["died"] == 1 and stats["started"] == 2
        assert process_of(shell) != pid
    assert "event=fetch_process_died" in log.read_text()


def waits_of(pid: int, thread: str) -> int:
    """How often a thread of that name has gone to sleep."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == thread:
            words = (task / "status").read_text().split()
            return int(words[words.index("voluntary_ctxt_switches:") + 1])
    raise AssertionError(f"no thread {thread}")


def test_a_miss_wakes_the_fetcher_seldom(
    sanitized_build: Path, server: ScriptedServer
) -> None:
    """Once: the reader sends the request, and the process tells of its end alone. It
    was four times. A busy machine adds some, as what is late is told of in parts."""
    reads, size = 50, 4096
    with FetchShell(sanitized_build) as shell:
        source = shell.add(source_of(server, unit=size))
        assert shell.read(source, 0, size).data == DATA[:size]
        before = waits_of(shell.pid, "fetcher")
        for n in range(2, 2 * reads + 2, 2):
            assert shell.read(source, n * size, size).data == DATA[n * size :][:size]
        assert waits_of(shell.pid, "fetcher") - before < 2.5 * reads


def test_no_identity_kills_it(sanitized_build: Path) -> None:
    """A text with control characters names nothing, and is not passed on."""

    def named(request: str) -> bytes:
        return server_of(request).replace(b'ETag: "one"', b'ETag: "a\tb"')

    with scripted_server(named) as server, FetchShell(sanitized_build) as shell:
        source = shell.add(source_of(server))
        assert shell.read(source, 0, UNIT, deadline_s=60).data == DATA[:UNIT]
        assert not shell.stats()["process"]["died"]


def test_it_does_not_outlive_its_server(
    sanitized_build: Path, server: ScriptedServer
) -> None:
    """Although it cannot see that the stream has ended."""
    with pytest.raises(BrokenPipeError), FetchShell(sanitized_build) as shell:
        source = shell.add(source_of(server))
        assert shell.read(source, 0, UNIT).data == DATA[:UNIT]
        pid = process_of(shell)
        os.kill(pid, signal.SIGSTOP)
        os.kill(shell.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
        raise BrokenPipeError


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_its_process(
    sanitized_build: Path, tmp_path: Path, lie: str
) -> None:
    """And no more: the next one is asked. A sanitizer's report would fail the shell."""
    lying = program(tmp_path, lie, DATA)
    with FetchShell(sanitized_build, fetch=lying) as shell:
        mirror = {"kind": "http", "url": "http://127.0.0.1:1/"}
        source = shell.add({"size": MIB, "unit": MIB, "mirrors": [mirror]})
        assert shell.read(source, 0, 4096, deadline_s=60).data == DATA[:4096]
        assert shell.stats()["process"]["died"] == 1


def test_a_mirror_of_its_own_is_asked_instead(
    sanitized_build: Path, tmp_path: Path
) -> None:
    """Whatever the process does, it fails nothing that a local mirror has."""
    (tmp_path / "file").write_bytes(DATA)
    lying = program(tmp_path, "nothing", DATA, times=1000)
    mirrors = [
        {"kind": "http", "url": "http://127.0.0.1:1/"},
        {"kind": "file", "path": str(tmp_path / "file")},
    ]
    with FetchShell(sanitized_build, fetch=lying) as shell:
        source = shell.add({"size": MIB, "unit": UNIT, "mirrors": mirrors})
        assert shell.read(source, 0, UNIT, deadline_s=60).data == DATA[:UNIT]


NOWHERE = {"size": MIB, "kind": "http", "url": "http://127.0.0.1:1/"}


@pytest.mark.parametrize("lie", INQUIRY_LIES | PROBE_LIES)
def test_a_lie_about_an_inquiry_costs_its_process(
    sanitized_build: Path, tmp_path: Path, lie: str
) -> None:
    with FetchShell(sanitized_build, fetch=program(tmp_path, lie, DATA)) as shell:
        answer = probe(shell, shell.add(NOWHERE))
        assert (answer.get("size"), answer.get("identity")) == (len(DATA), "etag x")
        # Its end is counted when it has ended, which the answer does not wait for.
        # NB: on a busy machine the login is there first, and then it is no lie.
        wanted = (0, 1) if lie == "an answer before its login" else (1,)
        wait_until(lambda: shell.stats()["process"]["died"] in wanted)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ("no answer", "not done in time: the fetch process says nothing"),
        ("a text for terminals", "red?[31m"),
        ("an answer twice", "wrong"),
    ],
)
def test_what_it_may_say_of_a_probe(
    sanitized_build: Path, tmp_path: Path, lie: str, message: str
) -> None:
    lying = program(tmp_path, lie, DATA, times=1000)
    with FetchShell(sanitized_build, fetch=lying) as shell:
        timeout_s = 1 if lie == "no answer" else 60
        answer = probe(shell, shell.add(NOWHERE), timeout_s=timeout_s)
        assert answer["error"] == message


def test_it_hangs_at_a_probe(sanitized_build: Path, server: ScriptedServer) -> None:
    """The probe ends at its deadline, and the next one has another process."""
    with FetchShell(sanitized_build) as shell:
        source = shell.add(source_of(server))
        assert probe(shell, source)["size"] == len(DATA)
        pid = process_of(shell)
        os.kill(pid, signal.SIGSTOP)
        assert probe(shell, source, timeout_s=1)["result"] == -errno.ETIMEDOUT
        assert probe(shell, source)["size"] == len(DATA)
        assert process_of(shell) != pid


@pytest.mark.data
@pytest.mark.parametrize("lie", ["other bytes", "bytes that change"])
def test_no_wrong_byte(sanitized_build: Path, tmp_path: Path, lie: str) -> None:
    units = units_of(DATA, UNIT)
    source = {
        **{"size": MIB, "unit": UNIT, "kind": "http", "url": "http://127.0.0.1:1/"},
        **{"digests": [unit.hex() for unit in units]},
        "root": root_of(units, size_bytes=MIB, unit_bytes=UNIT),
    }
    virtual = VirtualData(sanitized_build, tmp_path, MIB)
    virtual.add(source, DATA, 0)
    lying = program(tmp_path, lie, DATA, times=1000)
    segment = {"kind": "lazy", "length": MIB, "map": str(virtual.map), "deadline_s": 2}
    with EngineShell(
        sanitized_build, describe(segment), environment={"BTRFS_UBLK_FETCH": str(lying)}
    ) as shell:
        for unit in range(4):
            answer = shell.request(f"read {unit * UNIT} {UNIT}")
            assert answer in (DATA[unit * UNIT :][:UNIT], -errno.EIO, errno.EIO)
        stats = shell.stats()["lazy"][0]["fetcher"]
    assert lie != "other bytes" or stats["failures"]["wrong_digest"]
