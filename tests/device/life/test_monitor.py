"""Metrics and the live table, of devices that run."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.devices import description_file, device_command
from support.paths import PROJECT
from support.processes import freeze
from support.shells import UNIT, VirtualData
from support.waiting import wait_until
from support.web_servers import response, scripted_server

from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.ops.monitor.metrics import metrics_text
from btrfs_ublk.ops.monitor.samples import take_samples
from btrfs_ublk.server import Description, LazySegment

pytestmark = pytest.mark.usefixtures("in_process")

SIZE = 64 * UNIT
#: Where the data are of a server that has none.
GONE = 40 * UNIT
TIMEOUT_S = 60


def values(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """By name and labels; the parser refuses what is no such text."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    """The sum of all that have these labels."""
    found = [
        number
        for (metric, those), number in values(text).items()
        if metric == f"btrfs_ublk_{name}" and frozenset(labels.items()) <= those
    ]
    assert found, (name, labels, text)
    return sum(found)


def get(connection: http.client.HTTPConnection) -> str:
    connection.request("GET", "/metrics")
    reply = connection.getresponse()
    assert reply.status == 200
    assert str(reply.getheader("Content-Type")).startswith("text/plain; version=")
    return reply.read().decode()


@contextmanager
def exporter(listen: str) -> Iterator[str]:
    """``btrfs-ublk metrics --listen``, and where it says that it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "btrfs_ublk.cli.main", "metrics", "--listen", listen],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().removeprefix("listening on ").strip()
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_answers_scrapers() -> None:
    with exporter("127.0.0.1:0") as where:
        host, _, port = where.rpartition(":")
        # One that says nothing, and one that says nonsense, are in nobody's way.
        with socket.create_connection((host, int(port))) as silent:
            with socket.create_connection((host, int(port))) as loud:
                loud.sendall(b"\0" * 1000 + b"\r\n\r\n")
            for _ in range(3):
                values(get(http.client.HTTPConnection(host, int(port), timeout=30)))
            silent.close()


@pytest.fixture
def lazy_device(
    sanitized_build: Path, sanitized_helpers: None, sparse_path: Path
) -> Iterator[tuple[str, Path, VirtualData]]:
    virtual = VirtualData(sanitized_build, sparse_path, SIZE)
    virtual.fill()
    with scripted_server(lambda _: response("404 Not Found")) as server:
        mirror = {"kind": "http", "url": server.url()}
        source = {"size": UNIT, "unit": UNIT, "mirrors": [mirror]}
        virtual.add(source, bytes(UNIT), GONE)
        yield from serving(virtual, sparse_path)


def serving(
    virtual: VirtualData, sparse_path: Path
) -> Iterator[tuple[str, Path, VirtualData]]:
    segment = LazySegment(
        offset=0,
        length=SIZE,
        map=str(virtual.map),
        cache=str(virtual.directory / "cache"),
    )
    description = description_file(sparse_path, Description(SIZE, [segment]))
    added = device_command("up", "watched", description, "--front-end", "fuse")
    assert added.returncode == 0, added.stderr
    try:
        yield "watched", Path(added.stdout.strip()), virtual
    finally:
        device_command("down", "watched")


@pytest.mark.fuse
def test_metrics_of_a_device(lazy_device: tuple[str, Path, VirtualData]) -> None:
    name, path, virtual = lazy_device
    assert read_direct(path, 4 * UNIT, 3 * UNIT) == virtual.content(4 * UNIT, 3 * UNIT)
    text = metrics_text()
    assert value(text, "device_up", device=name) == 1
    assert value(text, "device_serving", device=name) == 1
    labels = {"device": name, "kind": "lazy", "operation": "read"}
    assert value(text, "bytes_total", **labels) >= 3 * UNIT
    # The server takes the times of a round of answers when it has sent all of them.
    wait_until(lambda: value(metrics_text(), "request_seconds_count", **labels) >= 1)
    assert value(text, "fetched_units_total", map=str(virtual.map)) >= 3
    assert value(text, "mappings", map=str(virtual.map)) > 10
    labels = {"map": str(virtual.map), "kind": "file", "host": ""}
    fetched = value(text, "fetched_units_total", map=str(virtual.map))
    assert value(text, "fetch_seconds_count", **labels) == fetched
    assert 0 < value(text, "fetch_seconds_sum", **labels) < 60
    with pytest.raises(OSError):
        read_direct(path, SIZE - UNIT, 4096)
    assert value(metrics_text(), "errors_total", device=name, kind="lazy") >= 1
    cache = str(virtual.directory / "cache")
    wait_until(
        lambda: value(metrics_text(), "cache_bytes", cache=cache) >= 3 * UNIT,
        metrics_text,
    )


@pytest.mark.fuse
def test_metrics_of_the_process_that_asks(
    lazy_device: tuple[str, Path, VirtualData],
) -> None:
    name, path, virtual = lazy_device
    labels = {"device": name, "map": str(virtual.map)}
    counts = ("running", "starts_total", "deaths_total", "failures_total")

    def now() -> list[float]:
        text = metrics_text()
        return [value(text, f"fetch_process_{count}", **labels) for count in counts]

    assert now() == [0, 0, 0, 0]
    with pytest.raises(OSError):
        read_direct(path, GONE, 4096)
    assert now() == [1, 1, 0, 0]
    (sample,) = take_samples()
    assert sample.stats and sample.device.state.server
    lacks = sample.stats.lazy[0].fetcher.process["lacks"]
    named = [dict(y) for x, y in values(metrics_text()) if x.endswith("process_lacks")]
    assert sorted(x["lacks"] for x in named) == sorted(lacks)
    check_that_what_is_watched_exists()
    server = psutil.Process(sample.device.state.server.pid)
    (process,) = (x for x in server.children() if x.name() == "btrfs-ublk-fetch")
    process.kill()
    wait_until(lambda: now() == [0, 1, 1, 0])
    freeze(server.pid)
    try:
        assert value(metrics_text(), "device_up", device=name) == 0
    finally:
        server.resume()
    assert value(metrics_text(), "device_up", device=name) == 1


MONITORING = PROJECT / "packaging/monitoring"
#: Those of nginx-prometheus-exporter, where nginx has stub_status.
OF_NGINX = {
    "nginx_connections_accepted",
    "nginx_connections_active",
    "nginx_connections_handled",
    "nginx_connections_reading",
    "nginx_connections_waiting",
    "nginx_connections_writing",
    "nginx_http_requests_total",
    "nginx_up",
}


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    """All that the alert rules and the dashboard ask Prometheus."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    targets = [x for panel in dashboard["panels"] for x in panel["targets"]]
    asked = [str(x["expr"]) for x in (*alert_rules(), *targets)]
    return asked + [x["query"]["query"] for x in dashboard["templating"]["list"][1:]]


def check_that_what_is_watched_exists() -> None:
    """Each metric, with each label, of the alert rules and of the dashboard."""
    there: dict[str, set[str]] = {name: {"instance"} for name in OF_NGINX}
    for name, labels in values(metrics_text()):
        there.setdefault(name, {"instance"}).update(key for key, _ in labels)
    asked = "\n".join(expressions())
    names = set(re.findall(r"\b(?:btrfs_ublk|nginx)_\w+", asked))
    assert len(names) > 20
    assert names - set(there) == set()
    for name, selector in re.findall(r"\b((?:btrfs_ublk|nginx)_\w+)\{([^}]*)\}", asked):
        assert set(re.findall(r"(\w+)[=!]", selector)) <= there[name], name


def test_alert_rules_are_those_of_the_document() -> None:
    for rule in alert_rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+m", rule.get("for", "0m"))
    document = MONITORING.parents[1] / "docs/how-to/operating.md"
    rows = re.findall(
        r"(?m)^\| [^|]+ \| `([^`]*btrfs_ublk_[^`]*)`", document.read_text()
    )
    known = {str(rule["expr"]) for rule in alert_rules()}
    assert len(rows) > 9 and not set(rows) - known
