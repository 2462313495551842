"""Fails each allocation and system call of a server in turn, at requests and starts.

``python tests/campaigns/failing_requests.py --help``. A server is asked again and
again, over a control connection and for what has to be fetched, and the first
allocation meanwhile fails, alone or with all later ones, then the second, until an
answer comes before one has failed; the same for kinds of system calls. The answer must
be right, or an error with a text; the server must not end, hang, or drop the
connection; the same request must then succeed; and what was acknowledged must be there
for the next server. What fails while a server starts ends it with a message, unless it
serves as ever. The same goes for the process that asks web servers: a read gets the
next process, or fails in time.
"""

import json
import math
import mmap
import os
import random
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import campaign
import click
from support.sanitized_build import SANITIZER_ENVIRONMENT
from support.shells import BLOCK, EngineShell, describe
from support.web_servers import ranged, response, scripted_server

from btrfs_ublk.base.capabilities import FUSE, require
from btrfs_ublk.base.entry import PathType, run_command
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Table
from btrfs_ublk.bench.study import Column, table
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.units import GIB, MIB

PROJECT = Path(__file__).resolve().parents[2]

ALLOCATION, EVERY_LATER = "allocation", "all allocations from one on"
#: Of csrc/tests/failing.c.
CALLS = (
    *("open", "read", "write", "pread", "pwrite", "fsync", "fdatasync", "ftruncate"),
    *("fallocate", "mmap", "dup", "memfd_create", "eventfd", "socketpair"),
)
_BLOCKS = 4096  # of the data, each of which is a unit
_STRIDE = 1021  # from one block that is read to the next
KINDS = (ALLOCATION, EVERY_LATER, *CALLS)
_HANGS_S = 60.0
START_FUSE = "start-fuse"
#: Of one request and kind of call, until the next one's turn.
_PROBLEMS_MAX = 5
_LOG_CHARACTERS = 3000
#: Of reads; what fails is tried again until then.
_DEADLINE_S = 1.5
#: Until it is read again, as the next process to ask servers may have to wait.
_AGAIN_S = 30.0
_LATE_S = 5.0  # after its deadline, on a busy machine
#: ``struct failing`` of csrc/tests/failing.h.
_FAILING = struct.Struct("24sQQQ??6x")
#: Where the same data come from a web server, and what requests add.
_REMOTE, _ADDED = 64 * MIB, 512 * MIB


#: What libraries leave when they cannot begin goes with the process.
_NO_LEAKS = {"ASAN_OPTIONS": "exitcode=99:detect_leaks=0"}


class Wrong(Exception):
    """What a server must not do."""


def _shape(value: Any) -> Any:
    """What of JSON stays when its numbers change."""
    if isinstance(value, dict):
        return {key: _shape(each) for key, each in value.items()}
    return "" if value is not None else None


class Failing:
    """Calls that fail from the start of a program on, until they no longer do."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_FAILING.size))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _FAILING.size)
        self.calls = 0  # of the kind, when they last ended

    def begin(self, kind: str, number: int) -> None:
        """As failing_begin()."""
        name = (ALLOCATION if kind == EVERY_LATER else kind).encode()
        later = kind == EVERY_LATER
        self._shared[:] = _FAILING.pack(name, number, 0, 0, later, True)

    def end(self) -> int:
        """As failing_end()."""
        *_, self.calls, failed, _later, _armed = _FAILING.unpack(self._shared[:])
        self._shared[:] = bytes(_FAILING.size)
        return int(failed)


class FuseServer:
    """A server with a file, which is read without a loop device."""

    def __init__(self, build: Path, directory: Path) -> None:
        ours, theirs = socket.socketpair()
        words = ["--front-end=fuse", "--queues=2", f"--control-fd={theirs.fileno()}"]
        with ours, theirs, (directory / "log").open("wb") as stderr:
            self._process = subprocess.Popen(
                [
                    build / "csrc/tests/failing-server",
                    *words,
                    directory / "description",
                ],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                env={
                    "BTRFS_UBLK_FETCH": str(build / "csrc/tools/btrfs-ublk-fetch"),
                    "FAILING": str(directory / "failing"),
                    **os.environ,
                    **SANITIZER_ENVIRONMENT,
                    **_NO_LEAKS,
                },
            )
            self._owner = ours.makefile("rb")

    def serves(self) -> bool:
        """Whether it is ready, or else has ended."""
        line = self._owner.readline()
        said = json.loads(line or "{}")
        self._file = said.get("file", "")
        return bool(said.get("event") == "ready")

    def request(self, line: str) -> bytes:
        """What is read, as of an EngineShell."""
        _read, offset, length = line.split()
        fd = os.open(self._file, os.O_RDONLY)
        try:
            return os.pread(fd, int(length), int(offset))
        finally:
            os.close(fd)

    def kill(self) -> None:
        """One that has ended is no error."""
        self._process.kill()

    def end(self) -> int:
        """End it, unless it has; return its exit status."""
        self._process.terminate()
        status = self._process.wait(_HANGS_S)
        self._owner.close()
        return status


class Scene:
    """A server with a map of data, from a file and a web server, and with a cache."""

    def __init__(self, build: Path, directory: Path) -> None:
        self._build, self.directory = build, directory
        data = random.Random(1).randbytes(_BLOCKS * BLOCK)
        self.data = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
        (directory / "data").write_bytes(data)
        self.acknowledged: dict[int, bytes] = {}
        self._next, self.error = 0, ""
        files = {name: str(directory / name) for name in ("map", "cache")}
        lazy = {"kind": "lazy", "length": GIB} | files
        self._description = describe(lazy | {"deadline_s": _DEADLINE_S})
        self._patient = describe(lazy)
        (directory / "description").write_text(json.dumps(self._patient))
        self.failing = Failing(directory / "failing")

    def web(self, request: str) -> bytes:
        """What a web server and registry answers."""
        if "/manifests/" in request:
            head = "200 OK\nContent-Type: application/vnd.oci.image.manifest.v1+json"
            return response(head, b'{"schemaVersion": 2, "layers": []}')
        if request.startswith("HEAD"):
            return response("200 OK\nETag: 1", length=_BLOCKS * BLOCK)
        return ranged(request, b"".join(self.data), "ETag: 1")

    @contextmanager
    def server(self, **environment: str) -> Iterator[EngineShell]:
        """A server, which goes on with what the last one has left."""
        log = self.directory / "log"
        with EngineShell(
            self._build, self._description, environment=environment, log=log
        ) as self.shell:
            yield self.shell

    def start(self) -> EngineShell:
        """A server whose calls fail while it starts."""
        variables = {"FAILING": str(self.directory / "failing")} | _NO_LEAKS
        log = self.directory / "log"
        return EngineShell(self._build, self._patient, environment=variables, log=log)

    def start_fuse(self) -> FuseServer:
        """The same, with a file."""
        return FuseServer(self._build, self.directory)

    def failing_fetch(self) -> str:
        """The program of a process that asks servers, and whose calls fail."""
        path = self.directory / "fetch"
        program = self._build / "csrc/tests/failing-fetch"
        failing = self.directory / "failing"
        (options,) = _NO_LEAKS.values()
        path.write_text(
            f"#!/bin/sh\nASAN_OPTIONS={options} FAILING={failing} exec {program}\n"
        )
        path.chmod(0o755)
        return str(path)

    def files(self) -> set[Path]:
        """All that there are."""
        return set(self.directory.rglob("*"))

    def begin(self, port: int) -> None:
        """Map what requests are about."""
        self.port = port
        size = {"size": _BLOCKS * BLOCK, "unit": BLOCK}
        local = {"kind": "file", "path": str(self.directory / "data")} | size
        remote = {"kind": "http", "url": f"http://127.0.0.1:{port}/data"} | size
        whole = [[0, size["size"], 0, 0], [_REMOTE, size["size"], 1, 0]]
        with self.server():
            self.ask("map-add", sources=[local, remote], mappings=whole)
            self.read(0)
            self.read(0, base=_REMOTE)

    def log(self) -> str:
        """The end of what the last server said."""
        return (self.directory / "log").read_text(errors="replace")[-_LOG_CHARACTERS:]

    def number(self) -> int:
        """Of a block that was not asked for so far."""
        self._next = (self._next + _STRIDE) % _BLOCKS
        return self._next

    def ask(self, name: str, /, **keys: Any) -> Any:
        """The body of an answer; None: an error."""
        answer = self.shell.map_request(name, **keys)
        if answer.get("reply") == name:
            return answer[name] if name in answer else True
        if not isinstance(answer.get("error"), str) or not answer["error"]:
            raise Wrong(f"it answers {answer}")
        self.error = answer["error"]
        return None

    def read(self, block: int, *, base: int = 0) -> bool:
        """Whether a block can be read, which is right."""
        answer = self.shell.request(f"read {base + block * BLOCK} {BLOCK}")
        if isinstance(answer, int):
            return False
        if answer != self.data[block]:
            raise Wrong(f"block {block} is read as something else")
        return True


#: Does a request; returns whether it succeeds, and may raise Wrong.
Attempt = Callable[[], bool]


def _same(name: str, *, room: str = "", **keys: Any) -> Callable[[Scene], Attempt]:
    """A request whose answer is the same each time. Another thread parses one with much
    ``room``."""
    keys |= {"room": room} if room else {}

    def prepare(scene: Scene) -> Attempt:
        expected = scene.ask(name, **keys)
        compared = _shape if "stat" in name or name == "info" else json.dumps

        def attempt() -> bool:
            answer = scene.ask(name, **keys)
            if answer is not None and compared(answer) != compared(expected):
                raise Wrong(f"it answers {answer}, and {expected} before")
            return answer is not None

        return attempt

    return prepare


def _read(base: int) -> Callable[[Scene], Attempt]:
    return lambda scene: partial(scene.read, scene.number(), base=base)


def _read_again(scene: Scene) -> Attempt:
    scene.read(0)
    return partial(scene.read, 0)


def _add(scene: Scene, *, in_file: bool = False) -> Attempt:
    number = scene.number()
    of, offset = scene.directory / f"data-{number}", _ADDED + number * 2 * BLOCK
    of.write_bytes(scene.data[number])
    source = {"kind": "file", "path": str(of), "size": BLOCK}
    row = [offset, BLOCK, 0, 0]
    path = scene.directory / "lines"

    def attempt() -> bool:
        if in_file:
            path.write_text(f"{json.dumps(source)}\n{json.dumps(row)}\n")
            scene.shell.send(f"with {path}")
            answer = scene.ask("map-add", in_file=True)
        else:
            answer = scene.ask("map-add", sources=[source], mappings=[row])
        if answer is None:
            return False
        if in_file:
            place = int.from_bytes(path.read_bytes()[:8], "little") & ~1
        else:
            place = answer["added"][0][0]
        if place != offset:
            raise Wrong(f"it adds at {place}, not at {offset}")
        scene.acknowledged[offset] = scene.data[number]
        return True

    return attempt


def _prefetch(base: int) -> Callable[[Scene], Attempt]:
    def prepare(scene: Scene) -> Attempt:
        start = base + scene.number() * BLOCK

        def attempt() -> bool:
            # One whose answer was lost may run.
            scene.ask("prefetch-cancel")
            where = {"from": start, "to": start + BLOCK}
            begun = scene.ask("prefetch-start", **where)
            if begun is None:
                return False
            follow = {"follow": begun["prefetch"]["id"]}
            for _ in range(10):
                answer = scene.ask("prefetch-status", **follow)
                if answer is None or answer["prefetch"]["state"] != "running":
                    break
            return bool(answer and answer["prefetch"]["state"] == "done")

        return attempt

    return prepare


def _trace(scene: Scene) -> Attempt:
    number = scene.number()

    def attempt() -> bool:
        begun = scene.ask("trace-start", limit=100, unit=BLOCK)
        if begun is None:
            # One whose answer was lost keeps others from beginning for half a minute.
            return "another recording" in scene.error
        scene.read(number)
        answer = scene.ask("trace-read", id=begun["id"], stop=True)
        if answer is None:
            scene.ask("trace-read", id=begun["id"], stop=True)
        return answer is not None

    return attempt


def _verify(scene: Scene) -> Attempt:
    """Also of mirrors; that one cannot be asked is a problem, which has a text."""

    def attempt() -> bool:
        answer = scene.ask("map-verify", ask=True)
        return answer is not None and not answer["problems"]

    return attempt


def _look_up(scene: Scene) -> Attempt:
    registry = {"registry": f"127.0.0.1:{scene.port}", "insecure": True}
    mirror = {"kind": "oci", "repository": "a"} | registry
    return lambda: scene.ask("map-look-up", mirror=mirror, name="latest") is not None


REQUESTS: dict[str, Callable[[Scene], Attempt]] = {
    "info": _same("info"),
    "info-long": _same("info", room=" " * 9000),
    "stats": _same("stats"),
    "map-add": _add,
    "map-add-file": partial(_add, in_file=True),
    "map-list": _same("map-list"),
    "map-show": _same("map-show", offset=0),
    "map-sources": _same("map-sources"),
    "map-stats": _same("map-stats"),
    "map-verify": _same("map-verify"),
    "map-verify-ask": _verify,
    "map-look-up": _look_up,
    "prefetch": _prefetch(0),
    "prefetch-remote": _prefetch(_REMOTE),
    "trace": _trace,
    "read": _read(0),
    "read-cached": _read_again,
    "read-remote": _read(_REMOTE),
}


def _check_what_is_left(scene: Scene) -> None:
    """Whether all is there that was acknowledged."""
    with scene.server() as shell:
        problems = scene.ask("map-verify")
        if not problems or problems["problems"]:
            raise Wrong(f"the map has {problems}")
        for offset, data in scene.acknowledged.items():
            if shell.request(f"read {offset} {BLOCK}") != data:
                raise Wrong(f"what was added at {offset} is not there")


@contextmanager
def _bounded(server: EngineShell | FuseServer) -> Iterator[None]:
    """Kill it if it hangs, and raise Wrong if it has gone."""
    hanging = threading.Timer(_HANGS_S, server.kill)
    hanging.start()
    try:
        yield
    except (ValueError, OSError) as error:
        server.kill()
        raise Wrong(f"the server has ended, or hung: {error}") from error
    except BaseException:
        server.kill()
        raise
    finally:
        hanging.cancel()


def _round(scene: Scene, attempt: Attempt, kind: str, number: int) -> tuple[int, bool]:
    """How many calls have failed, and whether the request succeeded."""
    name = ALLOCATION if kind == EVERY_LATER else kind
    with _bounded(scene.shell):
        scene.shell.fail(name, number, later=kind == EVERY_LATER)
        succeeded = attempt()
        failed = scene.shell.failed()
        if not attempt():
            raise Wrong("it does not succeed afterwards")
    return failed, succeeded


def _start(
    begin: Callable[[Scene], EngineShell | FuseServer],
    scene: Scene,
    kind: str,
    number: int,
) -> tuple[int, bool]:
    """How many calls of a server that starts have failed, and whether it serves. It
    reads right then, or ends with a message; and so does the next one read."""
    before = scene.files()
    scene.failing.begin(kind, number)
    server = begin(scene)
    with _bounded(server):
        serves = server.serves()
        failed = scene.failing.end()
        for base in (0, _REMOTE) if serves else ():
            block = scene.number()
            got = server.request(f"read {base + block * BLOCK} {BLOCK}")
            if got != scene.data[block]:
                raise Wrong(f"it starts, and does not read at {base}")
        status = server.end()
    said = serves or " error: " in scene.log()
    if status not in ((0,) if serves else (1, 2, 3)) or not said:
        raise Wrong(f"{'it starts, and' if serves else 'it'} ends with status {status}")
    _check_what_is_left(scene)
    if more := scene.files() - before:
        raise Wrong(f"it leaves {more}")
    return failed, serves


def _fetch(
    request: Callable[[Scene], Attempt], scene: Scene, kind: str, number: int
) -> tuple[int, bool]:
    """The same of the process that asks servers, and a request."""
    with scene.server(BTRFS_UBLK_FETCH=scene.failing_fetch()) as shell, _bounded(shell):
        scene.failing.begin(kind, number)
        began_s = time.monotonic()
        succeeded = request(scene)()
        took_s = time.monotonic() - began_s
        failed = scene.failing.end()
        if took_s > _DEADLINE_S + _LATE_S:
            raise Wrong(f"it takes {took_s:.1f} s")
        attempt = request(scene)
        while not attempt():
            if time.monotonic() > began_s + took_s + _AGAIN_S:
                raise Wrong("it does not succeed afterwards")
    if re.search(r"Sanitizer|runtime error|Assertion", scene.log()):
        raise Wrong("the process has crashed")
    return failed, succeeded


#: Fail calls from the start of a program on.
STARTS: dict[str, Callable[[Scene, str, int], tuple[int, bool]]] = {
    "start": partial(_start, Scene.start),
    START_FUSE: partial(_start, Scene.start_fuse),
    "fetch": partial(_fetch, _read(_REMOTE)),
    "fetch-look-up": partial(_fetch, _look_up),
}


def _fail_with_one(
    scene: Scene, name: str, kind: str, at: Iterator[int], result: dict[str, Any]
) -> None:
    """Until the last call, with one server; raises Wrong and AssertionError."""
    with nullcontext() if name in STARTS else scene.server():
        for number in at:
            result["number"] = number
            if name in STARTS:
                failed, succeeded = STARTS[name](scene, kind, number)
            else:
                failed, succeeded = _round(scene, REQUESTS[name](scene), kind, number)
            if not failed:
                break
            result["failed"] += 1
            result["succeeded"] += succeeded
    _check_what_is_left(scene)


def fail(scene: Scene, name: str, kind: str, at: Iterator[int]) -> dict[str, Any]:
    """Fail calls during requests of a name, those of the numbers that are given. After
    a problem, there is another server."""
    result: dict[str, Any] = {"problems": [], "number": 0, "failed": 0, "succeeded": 0}
    while len(result["problems"]) < _PROBLEMS_MAX:
        try:
            _fail_with_one(scene, name, kind, at, result)
            break
        except (Wrong, AssertionError) as error:
            said = f"{error or 'a report at its end'}: {scene.log()}"
            result["problems"].append(f"{name}, {kind} {result['number']}: {said}")
    return result


@contextmanager
def scene_of(build: Path, directory: Path) -> Iterator[Scene]:
    """A scene with its web server, in an empty directory."""
    scene = Scene(build, directory)
    with scripted_server(scene.web) as web:
        scene.begin(web.port)
        yield scene


def numbers(draw: random.Random, step: int, end_s: float = math.inf) -> Iterator[int]:
    """From 1 on, each; or one of each ``step`` at random. They end at a time, of
    time.monotonic()."""
    start = 1
    while time.monotonic() <= end_s:
        yield start + draw.randrange(step)
        start += step


def _tables(document: Document) -> list[Table]:
    names = {
        "of": lambda result: str(result["subject"]),
        "what fails": lambda result: str(result["kind"]),
    }
    columns = [Column("calls failed", "failed"), Column("it succeeds", "succeeded")]
    return [table("Failing calls", document["results"], names, columns, left=2)]


@campaign.command(
    "failing-requests",
    click.option(
        "--request", "requests", type=click.Choice([*REQUESTS, *STARTS]), multiple=True
    ),
    click.option(
        "--build",
        type=PathType(exists=True, file_okay=False),
        help="A build with -Dtests=true, and best with sanitizers.",
        default=PROJECT / "build/sanitized",
    ),
    click.option(
        "--step", type=options.COUNT, default=1, help="Fail one of so many calls."
    ),
    tables=_tables,
    kinds=KINDS,
    on_disks=False,
    has_directory=False,
    recorded=("step",),
)
def command(run: campaign.Run, requests: Sequence[str], step: int, build: Path) -> None:
    """Fail calls during all requests and starts, else each --request; all kinds of
    calls, else each --kind."""
    if START_FUSE in (requests or STARTS):
        require(FUSE)

    for name in requests or (*REQUESTS, *STARTS):
        with (
            tempdir(parent=run.directory) as directory,
            scene_of(build, directory) as scene,
        ):
            for kind in run.kinds:
                at = numbers(run.chances, step, run.end_s)
                result = fail(scene, name, kind, at) | {"subject": name, "kind": kind}
                if rounds := result["failed"] + len(result["problems"]):
                    run.add(result, rounds=rounds)
        options.progress(f"{name}: {run.done} so far, {len(run.problems())} faults")


if __name__ == "__main__":
    run_command(command, name="failing_requests.py")
