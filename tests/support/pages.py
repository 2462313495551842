"""Rows of the benchmark matrix, reports made of them, and a browser for pages."""

from __future__ import annotations

import base64
import json
import os
import random
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from btrfs_ublk.bench.config import Configuration, configuration_of
from btrfs_ublk.bench.environment import environment_id
from btrfs_ublk.bench.matrices import FORMAT_VERSION, MATRICES, run_key
from btrfs_ublk.bench.page.build import Page, build
from btrfs_ublk.bench.page.inputs import DocumentData, read_inputs
from btrfs_ublk.bench.run import Row

ENVIRONMENT = "0123456789ab"


def full_row(
    configuration: Configuration, *, iops: float | None = 100.0, status: str = "ok"
) -> Row:
    return configuration.to_dict() | {
        "total_iops": iops,
        "job_iops": [iops],
        "status": status,
        "reason": "because",
        "environment": ENVIRONMENT,
    }


def runs_in(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "run"]


Record = dict[str, Any]

#: What would run, were it not escaped, and what other programs take for a formula.
HOSTILE = "<script>alert('peer')</script>\"><img src=x onerror=alert(1)> $x_1$ \u202e"


def record(**changed: Any) -> Record:
    """An environment that is nobody's."""
    return {
        "time": "2024-01-01T00:00:00Z",
        "kernel": "6.99.0-test",
        "architecture": "x86_64",
        "cpu": "Test CPU",
        "cpu_flags": ["hypervisor", "erms"],
        "cpus": 4,
        "guest": None,
        "memory_bytes": 8 << 30,
        "file_system": "tmpfs",
        "file_system_bytes": 8 << 30,
        "file_system_free_bytes": 4 << 30,
        "loop_direct_io": False,
        "load": [0.1, 0.2, 0.3],
        "nice": 0,
        "btrfs_ublk": "0.0.1",
        "revision": "0123456789ab",
        "btrfs_progs": "btrfs-progs v0",
        "fio": "fio-3.99",
        "server": "0123456789ab",
        "mitigations": {"spectre_v2": "Mitigation: some; and more"},
        "python": "3.99",
    } | changed


def comparison(
    *,
    peers: tuple[str, ...] = ("btrfs-brd", "null_blk", "ublk-clone"),
    workloads: tuple[str, ...] = ("randread-psync", "randread-uring-d64"),
    factors: dict[str, float] | None = None,
    turns: int = 8,
    other_cores: float = 0.02,
    environment: Record | None = None,
    suite: str | None = None,
    measures: list[Record] | None = None,
    published: Record | None = None,
) -> Record:
    """A document of `bench compare`, in which each peer's figures are those of the
    first, times its factor, and all of one turn times the same.
    """
    chances = random.Random(7)
    named = [measure["name"] for measure in measures or [{"name": "iops"}]]
    results: list[Record] = []
    for turn in range(1, turns + 1):
        for workload in workloads:
            luck = chances.uniform(0.9, 1.1)
            for number, peer in enumerate(peers):
                factor = (factors or {}).get(peer, 1 + 0.25 * number)
                value = 100_000 * factor * luck
                results.append(
                    {
                        "comparison": "one / <b>two</b>",
                        "run": "a",
                        "peer": peer,
                        "layer": "file",
                        "workload": workload,
                        "turn": turn,
                        "status": "ok",
                        **dict.fromkeys([*named, "iops"], value),
                        **dict.fromkeys(("p50_us", "p99_us", "cpu_us"), 9.0),
                        **dict.fromkeys(("fio_us", "server_us", "kernel_us"), 3.0),
                        "cores": 1.5 * factor,
                        "other_cores": other_cores,
                    }
                )
    results.append(
        {
            "comparison": "one / <b>two</b>",
            "peer": "brd",
            "status": "skipped",
            "reason": "the module brd: <i>not</i> here",
        }
    )
    told: Record = {
        "title": "one / <b>two</b>",
        "peers": [*peers, "brd"],
        "workloads": list(workloads),
        "bars": [],
    }
    if measures is not None:
        told["measures"] = measures
    parameters: Record = {
        "suite": suite,
        "turns": turns,
        "runtime_s": 3.0,
        "size_bytes": 256 << 20,
        "queues": None,
        "depth": None,
        "seed": 1,
        "patience_s": 0.0,
        "realtime": False,
        "hog": None,
        "comparisons": [told],
    }
    if published is not None:
        parameters["published"] = published
    return {
        "version": 1,
        "benchmark": "compare",
        "parameters": parameters,
        "environment": environment or record(),
        "results": results,
    }


def matrix_lines(
    name: str = "full",
    *,
    blocks: int = 4,
    environment: Record | None = None,
    keep: float = 1.0,
) -> list[Record]:
    """A file of results whose IOPS follow from the configuration, but for chance. With
    ``keep`` below 1 some runs are rejected.
    """
    machine = environment or record()
    matrix = MATRICES[name].with_options(front_end="fuse", source="memset")
    identifier = environment_id(machine)
    first = matrix.configurations[0].to_dict()
    lines: list[Record] = [
        {
            "kind": "matrix",
            "version": FORMAT_VERSION,
            "matrix": name,
            "seed": 1,
            **{key: first[key] for key in ("front_end", "source", "fio.runtime")},
            "fingerprint": matrix.fingerprint(),
            "configurations": len(matrix.configurations),
        },
        {"kind": "environment", "id": identifier, **machine},
    ]
    chances = random.Random(3)
    for block in range(1, blocks + 1):
        for configuration in matrix.order(block, seed=1):
            iops = _iops(configuration) * chances.gauss(1, 0.03)
            cores = min(4.0, 0.8 * configuration.jobs**0.7) * chances.gauss(1, 0.02)
            good = chances.random() < keep
            row = configuration.to_dict() | {
                "total_iops": iops,
                "job_iops": [iops],
                "status": "ok" if good else "rejected",
                "cpu": {
                    **{"total": cores, "fio": cores / 2, "server": cores / 4},
                    **{"rest": cores / 4, "other": 0.01},
                },
                "cpu_us_per_io": {"total": 9.0, "fio": 4.0, "server": 3.0, "rest": 2.0},
                "latency_us": {"p50": 50.0, "p99": 99.0, "p99.99": 999.0},
                "load": 0.5,
                "environment": identifier,
                **({} if good else {"reason": "others used 2 cores"}),
            }
            key = run_key(configuration_of(row), environment=identifier, block=block)
            lines.append({"kind": "run", "key": key, "block": block} | row)
    return lines


def _iops(configuration: Configuration) -> float:
    engine = {"io_uring": 60e3, "mmap": 500e3, "psync": 20e3}[configuration.engine]
    size = 0.9 if configuration.total_clone_bytes > 100 << 30 else 1.0
    return float(engine * size * configuration.jobs**0.6)


def write_lines(path: Path, lines: list[Record]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def write_document(path: Path, document: Record) -> Path:
    path.write_text(json.dumps(document))
    return path


def document_data(path: Path, document: Record) -> DocumentData:
    """What the report reads of a document, which is written to ``path``."""
    (found,) = read_inputs([write_document(path, document)])
    assert isinstance(found, DocumentData)
    return found


def page_of(paths: Sequence[Path]) -> Page:
    return build(read_inputs(paths))


def hostile_comparison() -> Record:
    """Names that are code, long, and many."""
    names = (
        HOSTILE,
        "ublk-clone",
        "a-peer-with-a-name-that-is-much-longer-than-any-line-of-a-narrow-plot-can-be",
        "W" * 70,
        *(f"peer-number-{number}" for number in range(9)),
    )
    document = comparison(peers=names, turns=6)
    document["environment"]["cpu"] = f"CPU {HOSTILE}"
    document["environment"]["revision"] = HOSTILE
    return document


def bytes_comparison() -> Record:
    """Measures that are not IOPS, of which less is better; and published figures."""
    measures = [
        {"name": "peak_mib", "unit": "MiB", "better": "less", "digits": 1},
        {"name": "cold_ms", "unit": "ms", "better": "less", "digits": 0},
    ]
    figures = [
        {"workload": "ls -lR", "peer": "xfs", "like": "xfs", "measure": "peak_mib"},
        {"workload": "ls -lR", "peer": "cfs", "like": "erofs", "measure": "peak_mib"},
    ]
    published = {
        "source": "somebody",
        "hardware": "some machine",
        "note": "It differs.",
        "figures": [
            figure | {"value": value, "setting": ""}
            for figure, value in zip(figures, (50.0, 100.0))
        ],
        "other_hardware": True,
    }
    return comparison(
        peers=("xfs", "erofs", "sprout"),
        workloads=("ls -lR",),
        factors={"xfs": 0.001, "erofs": 0.0005, "sprout": 0.0025},
        measures=measures,
        published=published,
        suite="ls-lr",
        environment=record(guest="icount"),
    )


@dataclass(frozen=True)
class Chromium:
    """The browser, by either of the names that distributions give it."""

    name: ClassVar[str] = "chromium"
    hint: ClassVar[str] = "install the package chromium"

    @property
    def program(self) -> str | None:
        return shutil.which("chromium") or shutil.which("chromium-browser")

    def probe(self) -> str | None:
        return None if self.program else "it is not on PATH"


CHROMIUM = Chromium()
_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
#: What the browser reads and writes, see --remote-debugging-pipe.
_THEIR_INPUT, _THEIR_OUTPUT = 3, 4


class Browser:
    """One tab. Whatever takes longer than a minute raises TimeoutError."""

    def __init__(self, to_fd: int, from_fd: int) -> None:
        self._to, self._from = to_fd, from_fd
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        #: What it has asked the network, or the disk, for.
        self.requests: list[str] = []
        #: Faults that the page has, as it says itself: refused scripts and the like.
        self.complaints: list[str] = []

    def attach(self) -> None:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        found = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Show a file, as wide as a screen of so many CSS pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._loaded = False
        self._call("Page.navigate", url=path.absolute().as_uri())
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not self._loaded:
            self._take(deadline_s)

    def evaluate(self, script: str) -> Any:
        """What an expression is, as JSON."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(str(done["exceptionDetails"])[:2000])
        return done["result"].get("value")

    def pdf(self) -> bytes:
        """As it prints, on A4."""
        done = self._call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)
        return base64.b64decode(done["data"])

    def close(self) -> None:
        self._session = None
        self._call("Browser.close")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            answer = self._take(deadline_s)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                found: dict[str, Any] = answer["result"]
                return found

    def _take(self, deadline_s: float) -> dict[str, Any]:
        """The next message."""
        while b"\0" not in self._buffer:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._from], [], [], left_s)[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise EOFError("the browser has ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
            self.complaints.append(str(parameters))


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """A browser that keeps its files in ``directory``, and is gone after the block."""
    their_input, to_fd = os.pipe()
    from_fd, their_output = os.pipe()
    argv = [
        *(CHROMIUM.program or CHROMIUM.name, "--headless", "--remote-debugging-pipe"),
        f"--user-data-dir={directory / 'profile'}",
        *("--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", "--disable-extensions", "--disable-breakpad"),
        *("--hide-scrollbars", "--force-color-profile=srgb", "--no-zygote"),
    ]
    if os.geteuid() == 0:
        # Chromium refuses to be root in a sandbox. What it shows here is our own.
        argv.append("--no-sandbox")

    def place_pipes() -> None:
        for source, above in ((their_input, 100), (their_output, 101)):
            os.dup2(source, above)
        os.dup2(100, _THEIR_INPUT)
        os.dup2(101, _THEIR_OUTPUT)

    with (directory / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"HOME": str(directory)},
            pass_fds=(_THEIR_INPUT, _THEIR_OUTPUT),
            preexec_fn=place_pipes,
            start_new_session=True,
        )
    os.close(their_input)
    os.close(their_output)
    made = Browser(to_fd, from_fd)
    try:
        made.attach()
        yield made
        with suppress(OSError, EOFError, TimeoutError):
            made.close()
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S if process.poll() is None else 0)
        # Its own session, so its processes, and nobody else's.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_fd)
        os.close(from_fd)
