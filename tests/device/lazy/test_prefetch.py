"""Prefetching into the cache, by trace or by range."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.devices import any_command, description_file, device_command
from support.needs import Need, Serve
from support.processes import unwatched
from support.sanitized_build import SANITIZER_ENVIRONMENT
from support.waiting import wait_until
from support.web_servers import (
    ORIGIN_BYTES,
    ORIGIN_DATA,
    ORIGIN_UNIT,
    ORIGIN_UNITS,
    Origin,
    ScriptedServer,
    origin_source,
    scripted_server,
)

from btrfs_ublk.base.capabilities import FUSE, LOOP
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.content import Addition, MapClient, Prefetch
from btrfs_ublk.content.cache import Cache
from btrfs_ublk.content.maps import Refused
from btrfs_ublk.ops.monitor.metrics import metrics_text
from btrfs_ublk.server import BlockServer, Description, LazySegment
from btrfs_ublk.units import MIB

NAME = "prefetched"
TIMEOUT_S = 60
BLOCK = 4096  # of traces

fuse = pytest.mark.fuse


@pytest.fixture
def origin() -> Origin:
    return Origin()


@pytest.fixture
def web(origin: Origin) -> Iterator[ScriptedServer]:
    with scripted_server(origin) as server:
        yield server
        origin.go_on.set()


def describe(directory: Path, *, cached: bool = True) -> Description:
    segment = LazySegment(
        offset=0,
        length=ORIGIN_BYTES,
        map=str(directory / "it.map"),
        cache=str(directory / "cache") if cached else None,
        deadline_s=20,
    )
    return Description(ORIGIN_BYTES, [segment])


def until_over(client: MapClient, begun: Prefetch) -> Prefetch:
    now: Prefetch | None = begun

    def is_over() -> bool:
        nonlocal now
        now = client.prefetch_status(follow=begun.id)
        return now is None or not now.is_running

    wait_until(is_over, lambda: now)
    assert now is not None and now.id == begun.id
    return now


def test_records_and_replays(
    serve: Serve,
    sanitized_helpers: None,
    sparse_path: Path,
    origin: Origin,
    web: ScriptedServer,
) -> None:
    """By each front end; then the source is gone, and nobody misses it."""
    draw = random.Random(1)
    order = draw.sample(range(ORIGIN_UNITS), 24)
    directories = [sparse_path / name for name in ("one", "other")]
    for directory in directories:
        directory.mkdir()
    with serve(describe(directories[0])) as server:
        server.map_add([origin_source(web.url())], [Addition(offset=0)])
        client = server.map()
        for _ in range(2):  # what is cached already is noted as well
            number = client.trace_start()
            with pytest.raises(Refused, match="another recording"):
                client.trace_start()
            for unit in [*order, *order[:5]]:
                wanted = ORIGIN_DATA[unit * ORIGIN_UNIT :][:4096]
                assert read_direct(server.device, unit * ORIGIN_UNIT, 4096) == wanted
            page = client.trace_read(number, 0, stop=True)
            noted = [number * BLOCK for _, number, _ in page["reads"]]
            assert noted == [unit * ORIGIN_UNIT for unit in order]
            times = [at_ms for _, _, at_ms in page["reads"]]
            assert times == sorted(times) and page["lost"] == 0
        with pytest.raises(Refused, match="is over"):
            client.trace_read(number, 0)
        number = client.trace_start(limit=3)
        for unit in order[:8]:
            read_direct(server.device, unit * ORIGIN_UNIT, 4096)
        page = client.trace_read(number, 0, stop=True)
        assert len(page["reads"]) == 3 and page["lost"] == 5
    origin.asked.clear()
    with serve(describe(directories[1])) as server:
        server.map_add([origin_source(web.url())], [Addition(offset=0)])
        client = server.map()
        (source,) = client.sources()
        extents = [(source["id"], unit * ORIGIN_UNIT, ORIGIN_UNIT) for unit in order]
        begun = client.prefetch(extents, at_once=1, follow=True)
        ended = until_over(client, begun)
        assert ended.is_complete and ended.percent == 100
        assert (ended.units, ended.fetched_units) == (24, 24)
        assert list(dict.fromkeys(origin.asked)) == order
        assert server.stats().lazy[0].fetcher.retries >= len(origin.asked) - 24
        # Once more: all is there. Then the rest of it.
        ended = until_over(client, client.prefetch(extents))
        assert (ended.cached_units, ended.fetched_units) == (24, 0)
        ended = until_over(client, client.prefetch(start=0, end=ORIGIN_BYTES))
        assert (ended.cached_units, ended.fetched_units) == (24, 40)
        assert set(origin.asked) == set(range(ORIGIN_UNITS))
    origin.bad = set(range(ORIGIN_UNITS))
    with serve(describe(directories[1])) as server:
        assert read_direct(server.device, 0, ORIGIN_BYTES) == ORIGIN_DATA


@pytest.fixture
def server(
    need: Need, sanitized_helpers: None, sparse_path: Path, web: ScriptedServer
) -> Iterator[BlockServer]:
    need(FUSE, LOOP)
    with BlockServer(describe(sparse_path), front_end="fuse") as made:
        made.map_add([origin_source(web.url())], [Addition(offset=0)])
        yield made


@fuse
def test_readers_come_first(server: BlockServer, origin: Origin) -> None:
    """Sixteen units are fetched ahead at a time; none of them is answered before."""
    client = server.map()
    origin.held_units = 48
    with unwatched():
        begun = client.prefetch(start=0, end=48 * ORIGIN_UNIT, at_once=16)
        wait_until(lambda: len(origin.asked) == 16)
        for unit in (57, 55, 53):
            wanted = ORIGIN_DATA[unit * ORIGIN_UNIT :][:4096]
            assert read_direct(server.device, unit * ORIGIN_UNIT, 4096) == wanted
        now = client.prefetch_status()
        assert now is not None and now.id == begun.id and now.is_running, now
        # Nor did a reader wait until one of them was given up.
        assert len(origin.asked) == len(set(origin.asked)), origin.asked
    origin.go_on.set()
    assert until_over(client, begun).is_complete


@fuse
def test_keeps_to_its_rate(server: BlockServer) -> None:
    client = server.map()
    begun = client.prefetch(bytes_per_s=2 * MIB)
    with pytest.raises(Refused, match="running already"):
        client.prefetch()
    ended = until_over(client, begun)
    assert ended.is_complete and ended.bytes_per_s == 2 * MIB
    # Others on the machine may have read some of it before.
    assert ended.seconds > 0.9 * ended.fetched_bytes / (2 * MIB)


@fuse
def test_goes_on_after_failures(server: BlockServer, origin: Origin) -> None:
    client = server.map()
    origin.bad = {3, 40, 41}
    ended = until_over(client, client.prefetch())
    assert (ended.fetched_units, ended.failed_units) == (61, 3)
    assert ended.state == "done" and not ended.is_complete
    origin.bad = set()
    ended = until_over(client, client.prefetch())
    assert (ended.cached_units, ended.fetched_units) == (61, 3)
    assert ended.is_complete


@fuse
def test_drops_what_is_not_begun(server: BlockServer, origin: Origin) -> None:
    client = server.map()
    assert client.prefetch_status() is None and client.prefetch_cancel() is None
    origin.held_units = ORIGIN_UNITS
    begun = client.prefetch(at_once=4)
    wait_until(lambda: len(origin.asked) >= 4)
    ended = client.prefetch_cancel()
    assert ended is not None and ended.id == begun.id
    assert ended.state == "cancelled" and ended.percent < 100
    origin.go_on.set()
    assert len(origin.asked) <= 8
    assert until_over(client, client.prefetch()).is_complete


@contextmanager
def begun(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "btrfs_ublk.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def device(
    need: Need, sparse_path: Path, monkeypatch: pytest.MonkeyPatch, web: ScriptedServer
) -> Iterator[Path]:
    need(FUSE, LOOP)
    monkeypatch.setenv("BTRFS_UBLK_RUN_DIR", str(sparse_path / "run"))
    (sparse_path / "run").mkdir(mode=0o700)
    path = description_file(sparse_path, describe(sparse_path))
    done = device_command("up", NAME, path, "--front-end", "fuse")
    assert done.returncode == 0, done.stderr
    block_device = Path(done.stdout.strip())
    try:
        source = sparse_path / "source.json"
        # As signed URLs are; and its secret is nobody else's.
        source.write_text(json.dumps(origin_source(web.url("object?signature=s3cret"))))
        done = any_command("map", "add", NAME, "--source", source)
        assert done.returncode == 0, done.stderr
        yield block_device
    finally:
        device_command("down", NAME)


@fuse
def test_what_has_no_room_is_not_fetched(
    server: BlockServer, sparse_path: Path, origin: Origin
) -> None:
    """Nor is anything evicted for it; once there is more room, the rest comes."""
    cache, client = Cache(sparse_path / "cache"), server.map()

    def fetch() -> tuple[int, int, int]:
        """Units that were cached, fetched, and left out."""
        with unwatched():
            origin.asked.clear()
            ended = until_over(client, client.prefetch())
            asked = len(origin.asked)
        cached, fetched = ended.cached_units, ended.fetched_units
        left_out = ended.uncached_units
        assert ended.state == "done" and ended.is_complete == (not left_out)
        assert asked == fetched
        return cached, fetched, left_out

    # A 64th part is kept free.
    cache.limit(max_bytes=17 * ORIGIN_UNIT, reserve_bytes=None)
    assert fetch() == (0, 16, 48)
    assert sorted(origin.asked) == list(range(16))
    assert fetch() == (16, 0, 48)
    assert client.stats()["cache"]["evicted_units"] == 0
    cache.limit(max_bytes=33 * ORIGIN_UNIT, reserve_bytes=None)
    assert fetch() == (16, 16, 32)
    disk = os.statvfs(sparse_path)
    cache.limit(max_bytes=0, reserve_bytes=disk.f_blocks * disk.f_frsize)
    assert fetch() == (32, 0, 32)
    cache.limit(max_bytes=66 * ORIGIN_UNIT, reserve_bytes=0)
    assert fetch() == (32, 32, 0)
    assert client.stats()["cache"]["evicted_units"] == 0


@fuse
@pytest.mark.usefixtures("in_process")
def test_commands(device: Path, sparse_path: Path, origin: Origin) -> None:
    trace = sparse_path / "trace"
    order = [9, 2, 3, 4, 30]
    blocks = ORIGIN_UNIT // BLOCK
    with begun("trace", "record", NAME, "-o", trace, "--json") as recorder:
        assert recorder.stderr is not None
        assert recorder.stderr.readline() == "recording\n"
        for unit in order:
            read_direct(device, unit * ORIGIN_UNIT, ORIGIN_UNIT)
        recorder.send_signal(signal.SIGINT)
        said = recorder.communicate(timeout=TIMEOUT_S)[0]
    assert recorder.returncode == 0 and json.loads(said) == {
        "units": 5 * blocks,
        "lost": 0,
    }
    text = trace.read_text()
    assert "s3cret" not in text and "/object" in text
    # NB: reads that come late are not joined to those before.
    rows = [x for x in map(json.loads, text.splitlines()) if isinstance(x, list)]
    recorded = [at + x for _, at, count, *_ in rows for x in range(count)]
    assert recorded == [x * blocks + y for x in order for y in range(blocks)]
    done = any_command("trace", "record", NAME, "-o", trace, "--until-idle", "0.5")
    # Others on the machine may look at all its devices meanwhile.
    assert done.returncode == 0 and done.stdout.endswith(" blocks were read\n")
    trace.write_text(text)

    asked = len(origin.asked)
    done = any_command("prefetch", NAME, "--trace", trace)
    assert done.returncode == 0, done.stderr
    assert "5 were cached, 0 fetched" in done.stdout and len(origin.asked) == asked
    other = text.replace("/object", "/elsewhere").replace('"root":"', '"root":"f')
    trace.write_text(other)
    done = any_command("prefetch", NAME, "--trace", trace)
    assert done.returncode == 1 and "none of the sources" in done.stderr
    assert f"{5 * blocks} units are left out" in done.stderr

    # NB: on a slow machine, the limited ones come as far as that.
    origin.bad = {63}
    rate = "--rate", "64K"
    done = any_command("prefetch", NAME, "--all", *rate, "--no-wait", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["state"] == "running"
    labels = f'device="{NAME}",map="{sparse_path / "it.map"}"'
    assert f"btrfs_ublk_prefetch_running{{{labels}}} 1.0" in metrics_text()
    assert "running: " in any_command("prefetch", NAME, "--status").stdout
    assert "cancelled: " in any_command("prefetch", NAME, "--cancel").stdout

    def state() -> Any:
        return json.loads(any_command("prefetch", NAME, "--status", "--json").stdout)[
            "state"
        ]

    for how, status in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        with begun("prefetch", NAME, "--offset", "0", *rate) as client:
            wait_until(lambda: state() == "running")
            client.send_signal(how)
            assert client.wait(TIMEOUT_S) == status
        wait_until(lambda: state() == "cancelled")

    done = any_command("prefetch", NAME, "--offset", "0", "--length", "1M")
    assert done.returncode == 0 and "done: 100.0 % of 16 units" in done.stdout
    done = any_command("prefetch", NAME, "--all", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["failed_units"] == 1
    assert "warning: 1 units could not be fetched" in done.stderr
    log = (sparse_path / "run" / "devices" / NAME / "log").read_text()
    assert " event=fetch_failed source=1 unit=63 mirror=0 kind=http " in log
    assert "s3cret" not in log


def test_a_recording_without_a_client_ends(sanitized_build: Path) -> None:
    """While threads read, and without another recording."""
    done = subprocess.run(
        [sanitized_build / "csrc/tests/trace-shell", "1000"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | SANITIZER_ENVIRONMENT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "asked: on\nleft: over\nthe next: on\n"
