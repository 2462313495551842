"""The fetch process where the kernel, or what started the server, gives it less than it
asks for. It starts, fetches, and says once what it lacks.
"""

import errno
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.faults import refusing
from support.fetchers import DATA, UNIT, server_of, source_of
from support.shells import FetchShell
from support.web_servers import scripted_server

from btrfs_ublk.base.helpers import FETCH, helper_path

#: In a container, where /build is the build.
SHELL, PROGRAM = "/build/csrc/tests/fetch-shell", "/build/csrc/tools/btrfs-ublk-fetch"
#: landlock_create_ruleset(2), and seccomp(2), by machine.
LANDLOCK = 444
SECCOMP = 317 if os.uname().machine == "x86_64" else 277


def mounted(script: str) -> list[str]:
    """In a mount namespace of its own, after some commands."""
    return ["unshare", "--mount", "sh", "-ec", f'{script}; exec "$@"', "-"]


def without(*capabilities: str) -> list[str]:
    lost = ",".join(f"-{name}" for name in capabilities)
    return ["setpriv", "--no-new-privs", f"--bounding-set={lost}"]


#: What is put in front of a server's command, and what the process lacks then.
SURROUNDINGS: dict[str, tuple[Sequence[str], set[str]]] = {
    "a kernel without Landlock": (refusing({LANDLOCK: errno.ENOSYS}), {"landlock"}),
    "neither": (
        refusing({LANDLOCK: errno.ENOSYS, SECCOMP: errno.EPERM}),
        {"landlock", "seccomp"},
    ),
    "no capability to change the user": (
        without("setuid", "setgid", "kill", "sys_resource"),
        {"user"},
    ),
    "few threads for that user": (
        ["prlimit", "--nproc=8:8", *without("sys_resource")],
        {"user"},
    ),
    "no memory that may be locked": (
        ["prlimit", "--memlock=0:0", *without("sys_resource")],
        {"lock"},
    ),
    "a user namespace": (["unshare", "--user", "--map-root-user"], {"user"}),
    "processes that are hidden": (
        mounted("mount -t proc -o hidepid=2 none /proc"),
        set(),
    ),
    "a resolver that only root may read": (
        mounted("cp /etc/resolv.conf s; chmod 600 s; mount --bind s /etc/resolv.conf"),
        {"files"},
    ),
    "memory that is never executed": (
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec"]
        + ['echo 2 > /proc/sys/vm/memfd_noexec; exec "$@"', "-"],
        set(),
    ),
}


def assert_it_fetches(
    build: Path,
    tmp_path: Path,
    wrapper: Sequence[str],
    lacks: set[str],
    program: Path | None = None,
) -> None:
    log = tmp_path / "log"
    with scripted_server(server_of) as server:
        with FetchShell(build, log=log, fetch=program, prefix=wrapper) as shell:
            source = shell.add(source_of(server))
            for unit in range(2):
                answer = shell.read(source, unit * UNIT, UNIT)
                assert answer.data == DATA[unit * UNIT :][:UNIT], log.read_text()
            process = shell.stats()["process"]
    assert [process[x] for x in ("started", "died", "failed")] == [1, 0, 0]
    assert lacks <= set(process["lacks"])
    said = re.findall('event=fetch_process_unconfined .*lacks: (.*)"', log.read_text())
    assert said == ([", ".join(process["lacks"])] if process["lacks"] else [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be given less")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_it_fetches_with_what_there_is(
    sanitized_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wrapper, lacks = SURROUNDINGS[name]
    monkeypatch.chdir(tmp_path)
    tried = subprocess.run([*wrapper, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no such surroundings here: {tried.stderr.strip()}")
    assert_it_fetches(sanitized_build, tmp_path, wrapper, lacks)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be given less")
@pytest.mark.parametrize(("threads", "lacks"), [(8, True), (20000, False)])
def test_the_user_stays_only_where_it_must(threads: int, lacks: bool) -> None:
    """As installed: in a build with sanitizers, its memory is not limited."""
    wrapper = ["prlimit", f"--nproc={threads}:{threads}", *without("sys_resource")]
    done = subprocess.run(
        [*wrapper, helper_path(FETCH), "--check"], capture_output=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert (b"user" in done.stdout.split()) == lacks
