"""Kills, stops and starves the process that asks servers, while readers verify each
byte.

One server has several sources: plain ones, and blobs of a registry whose login comes
from a helper that is slow or hangs at times. Its fetch process is killed, stopped and
continued at random moments, or has nothing to do and ends; origins are restarted. No
byte may be wrong, no read may fail or hang, and nothing may be left: ``--help`` has the
options.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import campaign
import click
import psutil
from verified_reads import verified_reads

from btrfs_ublk.base.capabilities import FUSE, LOOP, ROOT, require
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.content import Addition, digest_file
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.server import BlockServer, Description, LazySegment
from btrfs_ublk.units import KIB, MIB

KINDS = ("kill", "stop", "origin", "helper", "mixed", "idle")
_OBJECT_BYTES, _UNIT_BYTES = 16 * MIB, 64 * KIB
_PLAIN, _BLOBS = 3, 2
_IDLE_S = 1.0
_LOGIN = "campaign:secret"
_MARGIN_S = 5.0
#: As csrc/lazy/mirror/helper.c has it: so many runs at once, then one each so often.
_RUNS_AT_ONCE, _RUN_S = 10, 5.0
#: Ends after 10 s, when the server kills it, if it hangs.
_HELPER = """#!/bin/sh
cat > /dev/null
echo run >> {runs}
case $(cat {mode}) in
hang) sleep 60 ;;
slow) sleep 2 ;;
esac
echo '{{"Username": "campaign", "Secret": "secret"}}'
"""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith("/v2/"):
            expected = "Basic " + base64.b64encode(_LOGIN.encode()).decode()
            if self.headers["Authorization"] != expected:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="campaign"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        files: dict[str, int] = self.server.files  # type: ignore[attr-defined]
        file = files[self.path.rpartition("/")[2]]
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{_OBJECT_BYTES}")
        self.send_header("Content-Length", str(int(last) - int(first) + 1))
        self.end_headers()
        self.wfile.write(os.pread(file, int(last) - int(first) + 1, int(first)))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that was killed


class Origin:
    """An HTTP server on a port of its own, which can be restarted."""

    def __init__(self, files: dict[str, int]) -> None:
        self._files = files
        self._server: _Server | None = None
        self.port = 0
        self.start()

    def start(self) -> None:
        server = _Server(("127.0.0.1", self.port), _Handler)
        server.files = self._files  # type: ignore[attr-defined]
        self.port = server.server_port
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        self._server = server

    def stop(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()
        self._server = None


class Bed:
    """A device with several sources, and what may happen to them."""

    def __init__(self, server: BlockServer, origins: list[Origin], root: Path) -> None:
        self.server = server
        self.origins = origins
        self._mode, self._runs = root / "mode", root / "runs"
        self.began_s = time.monotonic()

    def set_helper(self, mode: str) -> None:
        self._mode.write_text(mode)

    @property
    def helper_runs(self) -> int:
        return len(self._runs.read_bytes().splitlines())

    @property
    def helper_runs_max(self) -> float:
        # One more, because the helper may have been asked at the end of a period.
        return _RUNS_AT_ONCE + 1 + (time.monotonic() - self.began_s) / _RUN_S

    def fetchers(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.server.pid).children()
            return [one for one in children if one.name() == "btrfs-ublk-fetch"]
        return []

    def counts(self) -> dict[str, Any]:
        return dict(self.server.stats().lazy[0].fetcher.process)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.server.pid}/fd"))

    def windows(self) -> int:
        maps = Path(f"/proc/{self.server.pid}/maps").read_text()
        return maps.count("memfd:btrfs-ublk-fetch")


def _write(path: Path, number: int) -> None:
    """Write each 8 bytes' own offset on the device to them, as the reader expects."""
    first = number * _OBJECT_BYTES
    words = range(first, first + _OBJECT_BYTES, 8)
    path.write_bytes(b"".join(word.to_bytes(8, "little") for word in words))


def _source(number: int, origin: Origin, root: Path, name: str) -> dict[str, Any]:
    digests = digest_file(root / name, unit_bytes=_UNIT_BYTES)
    size = {"size": _OBJECT_BYTES, "unit": _UNIT_BYTES}
    known = {"digests": digests.hex(), "root": digests.root, "proxy": "none"}
    if number < _PLAIN:
        url = f"http://127.0.0.1:{origin.port}/{name}"
        return {"kind": "http", "url": url, **size, **known}
    blob = {"registry": f"127.0.0.1:{origin.port}", "repository": "campaign/data"}
    login = {"digest": name, "insecure": True, "docker_config": str(root / "config")}
    return {"kind": "oci", **blob, **login, **size, **known}


def _names(root: Path) -> list[str]:
    names = []
    for number in range(_PLAIN + _BLOBS):
        path = root / f"object{number}"
        _write(path, number)
        if number >= _PLAIN:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            path = path.rename(root / f"sha256:{digest}")
        names.append(path.name)
    return names


def _write_helper(root: Path, port: int) -> None:
    helper = root / "docker-credential-campaign"
    helper.write_text(_HELPER.format(runs=root / "runs", mode=root / "mode"))
    helper.chmod(0o700)
    (root / "runs").touch()
    (root / "mode").write_text("fast")
    config = {"credHelpers": {f"127.0.0.1:{port}": "campaign"}}
    (root / "config").write_text(json.dumps(config))
    (root / "config").chmod(0o600)


@contextmanager
def bed(parent: Path, *, deadline_s: int) -> Iterator[Bed]:
    with ExitStack() as stack:
        root = stack.enter_context(tempdir(parent=parent))
        names = _names(root)
        files = {name: os.open(root / name, os.O_RDONLY) for name in names}
        for file in files.values():
            stack.callback(os.close, file)
        # One for each plain source, and a registry.
        origins = [Origin(files) for _ in range(_PLAIN + 1)]
        for origin in origins:
            stack.callback(origin.stop)
        _write_helper(root, origins[_PLAIN].port)
        size = _OBJECT_BYTES * len(names)
        segment = LazySegment(
            offset=0, length=size, map=str(root / "map"), deadline_s=deadline_s
        )
        variables = {
            "BTRFS_UBLK_FETCH": "process",
            "BTRFS_UBLK_FETCH_IDLE_MS": str(round(_IDLE_S * 1000)),
            "PATH": f"{root}:{os.environ['PATH']}",
        }
        with campaign.environment(**variables):
            server = stack.enter_context(
                BlockServer(Description(size, [segment]), front_end="fuse")
            )
        server.map_add(
            [
                _source(number, origins[min(number, _PLAIN)], root, name)
                for number, name in enumerate(names)
            ],
            [
                Addition(
                    offset=number * _OBJECT_BYTES, length=_OBJECT_BYTES, source=number
                )
                for number in range(len(names))
            ],
        )
        yield Bed(server, origins, root)


def _signal(place: Bed, number: signal.Signals) -> bool:
    for process in place.fetchers():
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            return True
    return False


def _kill(place: Bed, chance: random.Random) -> None:
    time.sleep(chance.uniform(0.02, 1.5))
    _signal(place, signal.SIGKILL)


def _stop(place: Bed, chance: random.Random) -> None:
    time.sleep(chance.uniform(0.02, 0.5))
    stopped = place.fetchers()
    _signal(place, signal.SIGSTOP)
    time.sleep(chance.choice((0.05, 0.5, 2, 7)) * chance.random())
    for process in stopped:
        with suppress(psutil.NoSuchProcess):  # it was killed for its silence
            process.send_signal(signal.SIGCONT)


def _origin(place: Bed, chance: random.Random) -> None:
    origin = chance.choice(place.origins)
    origin.stop()
    time.sleep(chance.uniform(0, 0.7))
    origin.start()
    time.sleep(chance.uniform(0, 0.5))


def _helper(place: Bed, chance: random.Random) -> None:
    place.set_helper(chance.choice(("fast", "fast", "slow", "slow", "hang")))
    time.sleep(chance.uniform(0.2, 1))
    if chance.random() < 0.5:  # the next one needs the login again
        _signal(place, signal.SIGKILL)


_EVENTS: dict[str, Callable[[Bed, random.Random], None]] = {
    "kill": _kill,
    "stop": _stop,
    "origin": _origin,
    "helper": _helper,
}


def _disturb(place: Bed, kind: str, chance: random.Random, until_s: float) -> int:
    events = 0
    while time.monotonic() < until_s:
        name = chance.choice(tuple(_EVENTS)) if kind == "mixed" else kind
        _EVENTS[name](place, chance)
        events += 1
    place.set_helper("fast")
    return events


def _rest(place: Bed) -> list[str]:
    """Wait until the process has ended for want of work. Returns what is left."""
    until_s = time.monotonic() + _IDLE_S + _MARGIN_S
    while time.monotonic() < until_s and (place.fetchers() or place.windows()):
        time.sleep(0.05)
    left = [f"process {one.pid} is left" for one in place.fetchers()]
    if place.windows():
        left.append("shared memory is left")
    return left


def run_round(
    place: Bed, kind: str, *, duration_s: float, deadline_s: int, seed: int
) -> Result:
    chance = random.Random(seed)
    before, events, left = place.counts(), 0, []
    with verified_reads(
        place.server.device, depth=8, seed=seed, deadline_s=deadline_s + 5
    ) as reads:
        if kind == "idle":
            time.sleep(chance.uniform(0.1, 1))
        else:
            events = _disturb(place, kind, chance, time.monotonic() + duration_s)
        report = reads.finish()
    left = _rest(place)
    after = place.counts()
    return {
        "kind": kind,
        "seed": seed,
        "events": events,
        "reads": report["reads"],
        "errors": report["errors"],
        "wrong_bytes": report["wrong_bytes"],
        "hung": report["hung"],
        "max_s": report["max_ns"] / 1e9,
        "started": after["started"] - before["started"],
        "died": after["died"] - before["died"],
        "descriptors": place.descriptors(),
        "helper_runs": place.helper_runs,
        "helper_runs_max": place.helper_runs_max,
        "left": left,
    }


def faults_of(result: Result, descriptors: int) -> list[str]:
    """What went wrong in a round. ``descriptors`` were open before the first one."""
    found = list(result["left"])
    if not result["reads"]:
        found.append("nothing was read")
    for count in ("errors", "wrong_bytes", "hung"):
        if result[count]:
            found.append(f"{result[count]} {count}")
    if result["descriptors"] > descriptors:
        found.append(f"{result['descriptors']} descriptors, {descriptors} before")
    if result["helper_runs"] > result["helper_runs_max"]:
        found.append(f"{result['helper_runs']} runs of the helper")
    if result["kind"] in ("kill", "idle") and not result["started"]:
        found.append("no process was started")
    return [f"{result['kind']}, seed {result['seed']}: {one}" for one in found]


def tables(document: Document) -> list[Table]:
    columns = ("events", "reads", "errors", "wrong_bytes", "hung", "started", "died")
    rows = []
    for kind in KINDS:
        of_kind = [one for one in document["results"] if one["kind"] == kind]
        if of_kind:
            sums = [str(sum(one[name] for one in of_kind)) for name in columns]
            slowest = max(one["max_s"] for one in of_kind)
            rows.append([kind, str(len(of_kind)), *sums, f"{slowest:.1f}"])
    return [
        Table(
            "The fetch process, disturbed",
            ["what", "rounds", *(name.replace("_", " ") for name in columns), "max s"],
            rows,
        )
    ]


@click.command(context_settings=campaign.SETTINGS)
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, default=KINDS)
@click.option(
    "--rounds", type=campaign.COUNT, default=12, show_default=True, help="In all."
)
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=0.1),
    default=8.0,
    metavar="SECONDS",
    help="Of the events in each round.",
)
@campaign.seed_option
@campaign.limit_option
@campaign.deadline_option
@options.memory_directory_option
@campaign.output_option
def command(
    kinds: tuple[str, ...],
    rounds: int,
    duration_s: float,
    seed: int,
    limit_s: float,
    deadline_s: int,
    parent: Path,
    output: Path | None,
) -> None:
    """Disturb the process that asks servers, while readers verify each byte."""
    require(ROOT, LOOP, FUSE)
    results = campaign.Results(
        "fetch-process",
        tables,
        parameters={"rounds": rounds, "duration_s": duration_s, "seed": seed},
        directory=parent,
        output=output,
    )
    began_s = time.monotonic()
    with bed(parent, deadline_s=deadline_s) as place, results:
        results.add({"kind": "rest", "problems": _rest(place)}, rounds=0)
        descriptors = place.descriptors()
        for number in range(rounds):
            if time.monotonic() - began_s > limit_s:
                break
            result = run_round(
                place,
                kinds[number % len(kinds)],
                duration_s=duration_s,
                deadline_s=deadline_s,
                seed=seed + number,
            )
            result["problems"] = faults_of(result, descriptors)
            results.add(result)
            click.echo(json.dumps(result), err=True)
    results.conclude(seed=seed)


if __name__ == "__main__":
    run_command(command, name="fetch_process.py")
