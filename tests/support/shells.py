"""The C programs that tests drive line by line: a map's store, the cache, the engine,
the fetch process and mirrors."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import struct
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from support.sanitized_build import SANITIZER_ENVIRONMENT
from support.waiting import wait_until

STORE_TIMEOUT_S = 240


class StoreShell:
    """``with StoreShell(build, path) as shell:`` closes the map at the end."""

    def __init__(
        self, build: Path, path: Path, environment: dict[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [str(build / "csrc/tests/store-shell"), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | SANITIZER_ENVIRONMENT | (environment or {}),
        )
        #: Its first line: about the map, or why it was refused.
        self.opened: dict[str, Any] = {}

    def __enter__(self) -> StoreShell:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._fail()
        self.opened = json.loads(line)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.kill()
        if self.process.poll() is not None:
            return
        expected = 1 if "error" in self.opened else 0
        assert self.process.stdin is not None
        self.process.stdin.close()
        status = self.process.wait(STORE_TIMEOUT_S)
        self._close()
        assert status == expected, status

    def kill(self) -> None:
        """Kill with SIGKILL."""
        self.process.kill()
        self.process.wait(STORE_TIMEOUT_S)
        self._close()

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self._fail()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def add(
        self,
        mappings: list[list[int | None]],
        *sources: dict[str, Any],
        room: list[int] | None = None,
    ) -> dict[str, Any]:
        more = {} if room is None else {"room": room}
        return self.ask(add=mappings, sources=list(sources), **more)

    def list(self) -> list[list[int]]:
        mappings: list[list[int]] = self.ask(list=True)["mappings"]
        return mappings

    def _fail(self) -> None:
        self.process.kill()
        assert self.process.stderr is not None
        raise AssertionError(f"the shell ended: {self.process.stderr.read()}")

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def units_of(data: bytes, unit_bytes: int) -> list[bytes]:
    """Return the digest of each unit."""
    return [
        hashlib.sha256(data[at : at + unit_bytes]).digest()
        for at in range(0, len(data), unit_bytes)
    ]


def root_of(digests: list[bytes], *, size_bytes: int, unit_bytes: int) -> str:
    """Compute the root digest, as docs/materialisation.md defines it."""
    header = b"btrfs-ublk units 1\n" + struct.pack("<QI", size_bytes, unit_bytes)
    return hashlib.sha256(header + b"".join(digests)).hexdigest()


BLOCK = 4096
UNIT = 65536


def pattern(length: int) -> bytes:
    """What a ``pattern`` source holds, from its start."""
    words = (at.to_bytes(8, "little") for at in range(0, length + 7, 8))
    return b"".join(words)[:length]


class VirtualData:
    """``blocks`` has what each block must read as; None: nothing is mapped."""

    def __init__(self, build: Path, directory: Path, size: int) -> None:
        self._build = build
        self._draw = random.Random(7)
        self.directory = directory
        self.map = directory / "map"
        self.blocks: list[bytes | None] = [None] * (size // BLOCK)
        self._shell: StoreShell | None = None

    def add(self, source: dict[str, Any], data: bytes, offset: int) -> None:
        """All of a source, at an offset of the virtual data."""
        length = -(-len(data) // BLOCK) * BLOCK
        one = self._shell
        with nullcontext(one) if one else StoreShell(self._build, self.map) as shell:
            answer = shell.add([[offset, length, 0, 0]], source)
            assert "error" not in answer, answer
        padded = data + bytes(length - len(data))
        for at in range(0, length, BLOCK):
            self.blocks[(offset + at) // BLOCK] = padded[at : at + BLOCK]

    def add_file(
        self, name: str, offset: int, size: int, *, digests: bool = False
    ) -> Path:
        path = self.directory / name
        data = self._draw.randbytes(size)
        path.write_bytes(data)
        source = {"size": size, "unit": UNIT, "kind": "file", "path": str(path)}
        if digests:
            units = units_of(data, UNIT)
            source["digests"] = [unit.hex() for unit in units]
            source["root"] = root_of(units, size_bytes=size, unit_bytes=UNIT)
        self.add(source, data, offset)
        return path

    def fill(self) -> None:
        """22 units of all local kinds, next to each other, with holes."""
        with StoreShell(self._build, self.map) as self._shell:
            self.add(
                {"size": 2 * UNIT, "kind": "memset", "byte": 7}, b"\7" * 2 * UNIT, 0
            )
            size = UNIT + 4003  # in mid-word of the last block, and not a whole one
            self.add({"size": size, "kind": "pattern"}, pattern(size), 2 * UNIT)
            self.add_file("plain", 4 * UNIT, 3 * UNIT + 1234)
            self.add_file("digests", 7 * UNIT + BLOCK, 5 * UNIT, digests=True)
            self.add_file("tiny", 12 * UNIT + BLOCK, 1)
            for number in range(16):
                offset = 20 * UNIT + number * BLOCK
                self.add_file(f"block-{number}", offset, BLOCK - number)
        self._shell = None

    def content(self, offset: int, length: int) -> bytes | int:
        """The bytes, or the errno that a read must fail with."""
        blocks = self.blocks[offset // BLOCK : (offset + length) // BLOCK]
        known = [block for block in blocks if block is not None]
        return b"".join(known) if len(known) == len(blocks) else errno.EIO


TIMEOUT_S = 60
HEADER_BYTES = 512


def punch_hole(path: Path, offset: int, length: int) -> None:
    place = "-o", str(offset), "-l", str(length)
    subprocess.run(["fallocate", "-p", *place, path], check=True, timeout=TIMEOUT_S)


def key_of(number: int) -> str:
    """Return a key in hexadecimal digits, as in names of files."""
    return (number + 1).to_bytes(8, "little").hex() * 4


class CacheShell:
    """One process that has the cache open; see csrc/tests/cache-shell.c."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, *words: object) -> str:
        """Return the answer to a line, or "" if the process died meanwhile."""
        self.send(*words)
        return self.answer()

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def open(self, index: int, size: int, unit_bytes: int, key: str = "") -> str:
        return self.ask("open", index, key or key_of(index), size, unit_bytes)

    def stats(self) -> Any:
        return json.loads(self.ask("stats"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        """End the process; fail if a sanitizer reports something."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(TIMEOUT_S) == 0


def start_shell(
    build: Path,
    directory: Path,
    *,
    max_bytes: int = 0,
    reserve_bytes: int = 1,
    environment: dict[str, str] | None = None,
) -> CacheShell:
    """Start a shell; ``reserve_bytes`` 0 is the default: a twentieth of the disk."""
    return CacheShell(
        subprocess.Popen(
            [
                str(build / "csrc/tests/cache-shell"),
                str(directory),
                str(max_bytes),
                str(reserve_bytes),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | SANITIZER_ENVIRONMENT | (environment or {}),
        )
    )


@contextmanager
def cache_shell(build: Path, directory: Path, **options: Any) -> Iterator[CacheShell]:
    """Run a shell. At the end, close it, or kill it if the test fails."""
    shell = start_shell(build, directory, **options)
    with shell.process:
        try:
            yield shell
            if shell.process.poll() is None:
                shell.close()
        finally:
            shell.process.kill()


def cache_refusal(build: Path, directory: Path, *, reserve_bytes: int = 1) -> str:
    """Return the error that a cache in ``directory`` is refused with."""
    done = subprocess.run(
        [
            str(build / "csrc/tests/cache-shell"),
            str(directory),
            "0",
            str(reserve_bytes),
        ],
        input="",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    assert done.returncode == 1, done
    return done.stderr


SHELL_TIMEOUT_S = 60


class EngineShell:
    """One engine-shell process, which gets requests as lines."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def send(self, line: str) -> None:
        """Send a request without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def request(self, line: str) -> bytes | int:
        """Return what was read (b"" for other requests), or an errno."""
        self.send(line)
        return self.answer(line)

    def answer(self, line: str) -> bytes | int:
        """Return the answer to a request that was sent."""
        assert self._process.stdout is not None
        word, number = self._process.stdout.readline().split()
        if word == b"error":
            return int(number)
        if not line.startswith("read"):
            return b""
        return self._process.stdout.read(int(number))

    def stats(self) -> Any:
        """Return what a server would answer to a stats request."""
        return json.loads(self._line("stats"))

    def asked(self) -> list[str]:
        """Return the operations on files since the last call."""
        return self._line("asked").decode().split()

    def fail(self, kind: str, nth: int, *, later: bool = False) -> None:
        """Have calls of a kind fail from the next request on (failing.h)."""
        self.send(f"fail {kind} {nth} {int(later)}")

    def failed(self) -> int:
        """Have no more calls fail; return how many did."""
        return int(self._line("failed"))

    def map_request(self, name: str, /, **keys: Any) -> Any:
        """Return what a control connection would answer."""
        return json.loads(self._line(json.dumps({"request": name} | keys)))

    def kill(self) -> None:
        """Kill with SIGKILL. A process that has ended is no error."""
        self._process.kill()
        assert self._process.wait(SHELL_TIMEOUT_S) is not None
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # it has not read all
                pipe.close()

    def serves(self) -> bool:
        """Return whether it has started, rather than ended; calls fail no more."""
        try:
            return self.failed() >= 0
        except (ValueError, BrokenPipeError):
            return False

    def end(self) -> int:
        """End the process, unless it has; return its exit status."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        status = self._process.wait(SHELL_TIMEOUT_S)
        self._process.stdout.close()
        return status

    def close(self) -> None:
        """End the process; fail if a sanitizer reports something."""
        assert self.end() == 0

    def _line(self, request: str) -> bytes:
        self.send(request)
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def start_engine(
    build: Path,
    description: Path,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> EngineShell:
    """Start a shell, which the caller has to kill or close."""
    with log.open("wb") if log else nullcontext() as stderr:
        return EngineShell(
            subprocess.Popen(
                [build / "csrc/tests/engine-shell", description],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={
                    "BTRFS_UBLK_FETCH": str(build / "csrc/tools/btrfs-ublk-fetch"),
                    # Tests count requests, and the machine may be busy.
                    **os.environ,
                    **SANITIZER_ENVIRONMENT,
                    **(environment or {}),
                },
            )
        )


@contextmanager
def engine_shell(
    build: Path,
    description: dict[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[EngineShell]:
    """Run a shell, with stderr to ``log``. At the end, close it, or kill it if the test
    fails."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(description, file)
        file.flush()
        shell = start_engine(build, Path(file.name), environment, log)
        try:
            yield shell
        except BaseException:
            shell.kill()
            raise
        shell.close()


def describe(*segments: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Describe segments without offsets, which are placed one after the other."""
    offset = 0
    placed = []
    for segment in segments:
        placed.append({"offset": offset} | segment)
        offset += segment["length"]
    return {"version": 1, "size": offset, "segments": placed} | keys


EXIT_TIMEOUT_S = 60


@dataclass(frozen=True)
class Answer:
    """The answer to a read: 0 and the data, or a negative errno."""

    result: int
    data: bytes
    ms: float


class FetchShell:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self._sources = 0
        self._reads = 0
        self._answers: dict[int, Answer] = {}

    def _send(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        """Return the next answer that is not to a read. Answers to reads are kept."""
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline()
            assert line, "fetch-shell has ended"
            answer: dict[str, Any] = json.loads(line)
            if "read" not in answer:
                return answer
            data = self._process.stdout.read(answer["bytes"])
            self._answers[answer["read"]] = Answer(answer["result"], data, answer["ms"])

    def ask(self, line: dict[str, Any]) -> dict[str, Any]:
        """Send a request that is answered at once, and return the answer."""
        self._send(line)
        return self._receive()

    def add(self, source: dict[str, Any]) -> int:
        answer = self.ask({"source": source})
        assert "error" not in answer, answer
        self._sources += 1
        return int(answer["source"])

    def pin(self, source: int, identity: str) -> None:
        """Pin the identity of its first mirror, before it is read."""
        self._send({"identity": 1, "source": source, "text": identity})

    def begin(
        self, source: int, offset: int, length: int, *, deadline_s: float | None = 30
    ) -> int:
        """Begin a read and return its number. ``finish`` waits for its answer."""
        self._reads += 1
        line = {
            "read": self._reads,
            "source": source,
            "offset": offset,
            "length": length,
        }
        if deadline_s is not None:
            line["deadline_ms"] = round(deadline_s * 1000)
        self._send(line)
        return self._reads

    def prefetch(self, source: int, offset: int, length: int) -> None:
        keys = {"source": source, "offset": offset, "length": length}
        self._send({"prefetch": 1, **keys})

    def wait_for(self, reads: Collection[int]) -> None:
        """Wait until these are answered, and perhaps others not. ``finish`` returns
        all answers."""
        wait_until(lambda: self.stats() and self._answers.keys() >= set(reads))

    def finish(self) -> dict[int, Answer]:
        """Wait for all reads, and return their answers by the numbers of ``begin``."""
        self.ask({"wait": 1})
        answers, self._answers = self._answers, {}
        return answers

    def read(
        self, source: int, offset: int, length: int, *, deadline_s: float | None = 30
    ) -> Answer:
        number = self.begin(source, offset, length, deadline_s=deadline_s)
        return self.finish()[number]

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.ask({"stats": 1})["fetcher"]
        return stats


@contextmanager
def fetch_shell(
    build: Path,
    *options: str,
    log: Path | None = None,
    program: Path | None = None,
    wrapper: Sequence[str] = (),
) -> Iterator[FetchShell]:
    """Run a fetch-shell with stderr to ``log``, and check its exit status. ``wrapper``
    is put in front of its command.

    Its servers are asked by the fetch process, as a server's are, or by ``program`` in
    its place; with ``BTRFS_UBLK_FETCH=in-process``, by the fetch-shell itself.
    """
    if program or os.environ.get("BTRFS_UBLK_FETCH") != "in-process":
        program = program or build / "csrc/tools/btrfs-ublk-fetch"
        options = (*options, f"process={program}")
    stderr = log.open("wb") if log else None
    process = subprocess.Popen(
        [*wrapper, build / "csrc/tests/fetch-shell", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    if stderr:
        stderr.close()
    with process:
        try:
            yield FetchShell(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(EXIT_TIMEOUT_S) == 0
        finally:
            process.kill()


#: Variables that are removed, so that tests reach their servers without a proxy.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class MirrorAnswer:
    """The answer to one fetch: ``data``, or the reason why there are none."""

    data: bytes | None
    result: int
    failure: str = ""
    text: str = ""
    hint: str = ""
    retry_after_ms: int = 0
    identity: str | None = None


class MirrorShell:
    """A running mirror-shell."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def _ask(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "it has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _answer(self, length: int) -> MirrorAnswer:
        assert self._process.stdout
        line = self._line()
        data = None if line["result"] else self._process.stdout.read(length)
        return MirrorAnswer(data=data, **line)

    def probe(self, *, timeout_ms: int = 30_000) -> dict[str, Any]:
        """Return {"result": 0, "size": …, "identity": …}, or result, text and hint."""
        self._ask(f"probe {timeout_ms}")
        return self._line()

    def pin(self, identity: str) -> None:
        self._ask(f"pin {identity}")
        self._line()

    def fetch(
        self, offset: int, length: int, *, timeout_ms: int = 30_000
    ) -> MirrorAnswer:
        return self.fetch_many(offset, length, 1, timeout_ms=timeout_ms)[0]

    def fetch_many(
        self, offset: int, length: int, count: int, *, timeout_ms: int = 30_000
    ) -> list[MirrorAnswer]:
        """Fetch ``count`` adjacent ranges at the same time."""
        self._ask(f"fetch {offset} {length} {timeout_ms} {count}")
        return [self._answer(length) for _ in range(count)]

    def cancel(self, offset: int, length: int, *, after_ms: int) -> MirrorAnswer:
        """Begin a fetch, and cancel it ``after_ms`` milliseconds later."""
        self._ask(f"cancel {offset} {length} {after_ms}")
        return self._answer(length)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k.lower() not in _PROXIES}
    return inherited | SANITIZER_ENVIRONMENT | dict(extra)


@contextmanager
def mirror_shell(
    build: Path,
    directory: Path,
    keys: Mapping[str, object],
    *,
    size: int,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[MirrorShell]:
    """Run a shell for a source with only this mirror. Fails at the end if the build's
    sanitizers have found a leak or another error.
    """
    source = directory / "source.json"
    source.write_text(json.dumps({**keys, "size": size}), encoding="utf-8")
    process = subprocess.Popen(
        [*prefix, str(build / "csrc/tests/mirror-shell"), str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(environment or {}),
    )
    try:
        yield MirrorShell(process)
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def mirror_refusal(build: Path, directory: Path, keys: Mapping[str, object]) -> str:
    """Return the error message for wrong keys."""
    source = directory / "source.json"
    source.write_text(json.dumps({"size": 4096, **keys}), encoding="utf-8")
    done = subprocess.run(
        [str(build / "csrc/tests/mirror-shell"), str(source)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=_environment({}),
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr
