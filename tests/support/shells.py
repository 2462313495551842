"""The C programs that tests drive line by line: a map's store, the cache, the engine,
the fetch process and mirrors."""

import errno
import hashlib
import json
import os
import random
import struct
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.sanitized_build import SANITIZER_ENVIRONMENT
from support.waiting import wait_until

BLOCK = 4096
UNIT = 65536
HEADER_BYTES = 512
#: Variables that are removed, so that tests reach their servers without a proxy.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class Shell:
    """A running program that answers lines. At the end of its ``with``, it is closed,
    which fails if a sanitizer has found something; it is killed if the test fails."""

    program = ""
    timeout_s = 60

    def __init__(
        self,
        build: Path,
        *arguments: object,
        document: object = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        prefix: Sequence[str | Path] = (),
    ) -> None:
        """``document`` is its last argument, a file of JSON; ``log`` gets stderr;
        ``prefix`` is put in front of its command."""
        inherited = {k: v for k, v in os.environ.items() if k.lower() not in _PROXIES}
        with ExitStack() as stack:
            passed = []
            if document is not None:
                file = stack.enter_context(open(os.memfd_create("it.json", 0), "w+"))
                json.dump(document, file)
                file.flush()
                passed.append(file.fileno())
                arguments = (*arguments, f"/proc/self/fd/{file.fileno()}")
            stderr = stack.enter_context(log.open("wb") if log else nullcontext())
            program = build / "csrc/tests" / self.program
            self.process = subprocess.Popen(
                [*map(str, (*prefix, program, *arguments))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=passed,
                env=inherited | SANITIZER_ENVIRONMENT | dict(environment or {}),
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._ended = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.kill()
        elif not self._ended:
            self.close()

    def send(self, *words: object) -> None:
        """Send a line without waiting for its answer."""
        self._stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self._stdin.flush()

    def line(self, *words: object) -> str:
        """Send a line, if there is one to send, and return a line of the answer: "" if
        the process has ended."""
        if words:
            self.send(*words)
        return self._stdout.readline().decode().strip()

    def document(self, *words: object) -> dict[str, Any]:
        """As line(), of JSON. Raises ValueError if the process has ended."""
        made: dict[str, Any] = json.loads(self.line(*words))
        return made

    def kill(self) -> None:
        """Kill with SIGKILL. A process that has ended is no error."""
        self.process.kill()
        self.end()

    def end(self) -> int:
        """End the process, unless it has ended; return its exit status."""
        self._ended = True
        with suppress(BrokenPipeError):  # it has not read all
            self._stdin.close()
        status = self.process.wait(self.timeout_s)
        self._stdout.close()
        return status

    def close(self, status: int = 0) -> None:
        """End the process; fail if a sanitizer reports something."""
        assert self.end() == status


def refusal(
    shell: type[Shell], *given: Any, statuses: Collection[int] = (1, 2), **options: Any
) -> str:
    """Return what a shell says that is refused what it is given."""
    with open(os.memfd_create("said"), "rb") as said:
        path = Path(f"/proc/self/fd/{said.fileno()}")
        assert shell(*given, log=path, **options).end() in statuses
        return said.read().decode()


class StoreShell(Shell):
    program = "store-shell"
    timeout_s = 240

    def __init__(
        self, build: Path, path: Path, environment: dict[str, str] | None = None
    ) -> None:
        super().__init__(build, path, environment=environment)
        #: Its first line: about the map, or why it was refused.
        self.opened: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.opened = self.document()
        return self

    def close(self, status: int = 0) -> None:
        super().close(1 if "error" in self.opened else 0)

    def ask(self, **command: Any) -> dict[str, Any]:
        return self.document(json.dumps(command))

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


def punch_hole(path: Path, offset: int, length: int) -> None:
    place = "-o", str(offset), "-l", str(length)
    subprocess.run(["fallocate", "-p", *place, path], check=True, timeout=60)


def key_of(number: int) -> str:
    """Return a key in hexadecimal digits, as in names of files."""
    return (number + 1).to_bytes(8, "little").hex() * 4


class CacheShell(Shell):
    """One process that has the cache open; see csrc/tests/cache-shell.c.
    ``reserve_bytes`` 0 is the default: a twentieth of the disk."""

    program = "cache-shell"

    def __init__(
        self,
        build: Path,
        directory: Path,
        *,
        max_bytes: int = 0,
        reserve_bytes: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(build, directory, max_bytes, reserve_bytes, **options)

    def open(self, index: int, size: int, unit_bytes: int, key: str = "") -> str:
        return self.line("open", index, key or key_of(index), size, unit_bytes)

    def stats(self) -> Any:
        return self.document("stats")


class EngineShell(Shell):
    """One engine-shell process, which gets requests as lines."""

    program = "engine-shell"

    def __init__(
        self,
        build: Path,
        description: dict[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        fetch = build / "csrc/tools/btrfs-ublk-fetch"
        variables = {"BTRFS_UBLK_FETCH": os.environ.get("BTRFS_UBLK_FETCH", str(fetch))}
        variables |= environment or {}
        super().__init__(build, document=description, environment=variables, log=log)

    def request(self, line: str) -> bytes | int:
        """Return what was read (b"" for other requests), or an errno."""
        self.send(line)
        return self.answer(line)

    def answer(self, line: str) -> bytes | int:
        """Return the answer to a request that was sent."""
        word, number = self.line().split()
        if word == "error":
            return int(number)
        return self._stdout.read(int(number)) if line.startswith("read") else b""

    def stats(self) -> Any:
        """Return what a server would answer to a stats request."""
        return self.document("stats")

    def asked(self) -> list[str]:
        """Return the operations on files since the last call."""
        return self.line("asked").split()

    def fail(self, kind: str, nth: int, *, later: bool = False) -> None:
        """Have calls of a kind fail from the next request on (failing.h)."""
        self.send("fail", kind, nth, int(later))

    def failed(self) -> int:
        """Have no more calls fail; return how many did."""
        return int(self.line("failed"))

    def map_request(self, name: str, /, **keys: Any) -> Any:
        """Return what a control connection would answer."""
        return self.document(json.dumps({"request": name} | keys))

    def wait_until_cached(self) -> None:
        """Wait until all that was fetched is durable, or dropped."""

        def is_cached() -> bool:
            (stats,) = self.stats()["lazy"]
            now = stats["fetcher"]
            waiting = now["units_queued"] + now["units_in_flight"]
            waiting += now["unstored_bytes"] + stats["cache"]["pending_units"]
            return not waiting

        wait_until(is_cached, self.stats)

    def serves(self) -> bool:
        """Return whether it has started, rather than ended; calls fail no more."""
        try:
            return self.failed() >= 0
        except (ValueError, BrokenPipeError):
            return False


def describe(*segments: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Describe segments without offsets, which are placed one after the other."""
    offset = 0
    placed = []
    for segment in segments:
        placed.append({"offset": offset} | segment)
        offset += segment["length"]
    return {"version": 1, "size": offset, "segments": placed} | keys


@dataclass(frozen=True)
class Answer:
    """The answer to a read: 0 and the data, or a negative errno."""

    result: int
    data: bytes
    ms: float


class FetchShell(Shell):
    """Its servers are asked by the fetch process, as a server's are, or by ``fetch`` in
    its place; with ``BTRFS_UBLK_FETCH=in-process``, by the fetch-shell itself."""

    program = "fetch-shell"

    def __init__(
        self,
        build: Path,
        *options: str,
        fetch: Path | None = None,
        log: Path | None = None,
        prefix: Sequence[str | Path] = (),
    ) -> None:
        if fetch or os.environ.get("BTRFS_UBLK_FETCH") != "in-process":
            fetch = fetch or build / "csrc/tools/btrfs-ublk-fetch"
            options = (*options, f"process={fetch}")
        super().__init__(build, *options, log=log, prefix=prefix)
        self._reads = 0
        self._answers: dict[int, Answer] = {}

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request that is answered at once, and return the answer. Answers to
        reads that come before it are kept."""
        self.send(json.dumps(request))
        while "read" in (answer := self.document()):
            data = self._stdout.read(answer["bytes"])
            self._answers[answer["read"]] = Answer(answer["result"], data, answer["ms"])
        return answer

    def add(self, source: dict[str, Any]) -> int:
        answer = self.ask({"source": source})
        assert "error" not in answer, answer
        return int(answer["source"])

    def pin(self, source: int, identity: str) -> None:
        """Pin the identity of its first mirror, before it is read."""
        self.send(json.dumps({"identity": 1, "source": source, "text": identity}))

    def begin(
        self, source: int, offset: int, length: int, *, deadline_s: float | None = 30
    ) -> int:
        """Begin a read and return its number. ``finish`` waits for its answer."""
        self._reads += 1
        request = {"read": self._reads, "source": source}
        request |= {"offset": offset, "length": length}
        if deadline_s is not None:
            request["deadline_ms"] = round(deadline_s * 1000)
        self.send(json.dumps(request))
        return self._reads

    def prefetch(self, source: int, offset: int, length: int) -> None:
        keys = {"source": source, "offset": offset, "length": length}
        self.send(json.dumps({"prefetch": 1, **keys}))

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


class MirrorShell(Shell):
    """A shell for a source with only one mirror, of these ``keys``."""

    program = "mirror-shell"

    def __init__(
        self, build: Path, keys: Mapping[str, object], *, size: int, **options: Any
    ) -> None:
        super().__init__(build, document={**keys, "size": size}, **options)

    def _answer(self, length: int) -> MirrorAnswer:
        answer = self.document()
        data = None if answer["result"] else self._stdout.read(length)
        return MirrorAnswer(data=data, **answer)

    def probe(self, *, timeout_ms: int = 30_000) -> dict[str, Any]:
        """Return {"result": 0, "size": …, "identity": …}, or result, text and hint."""
        return self.document("probe", timeout_ms)

    def pin(self, identity: str) -> None:
        self.document("pin", identity)

    def fetch(
        self, offset: int, length: int, *, timeout_ms: int = 30_000
    ) -> MirrorAnswer:
        return self.fetch_many(offset, length, 1, timeout_ms=timeout_ms)[0]

    def fetch_many(
        self, offset: int, length: int, count: int, *, timeout_ms: int = 30_000
    ) -> list[MirrorAnswer]:
        """Fetch ``count`` adjacent ranges at the same time."""
        self.send("fetch", offset, length, timeout_ms, count)
        return [self._answer(length) for _ in range(count)]

    def check_all(self, data: bytes) -> None:
        """Fetch all of an object, with as many requests as it has whole units."""
        count = len(data) // UNIT
        found = [x.data for x in self.fetch_many(0, UNIT, count)]
        assert found == [data[i * UNIT :][:UNIT] for i in range(count)]
        assert self.fetch(count * UNIT, len(data) % UNIT).data == data[count * UNIT :]

    def cancel(self, offset: int, length: int, *, after_ms: int) -> MirrorAnswer:
        """Begin a fetch, and cancel it ``after_ms`` milliseconds later."""
        self.send("cancel", offset, length, after_ms)
        return self._answer(length)
