"""Metrics and the live table, of devices that run."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from support.devices import description_file, device_command
from support.paths import PROJECT
from support.processes import freeze
from support.shells import UNIT, VirtualData
from support.waiting import wait_until
from support.web_servers import response, scripted_server

from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.cli.cache import command as cache
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.ops.monitor.exporter import Address, metrics_server
from btrfs_ublk.ops.monitor.metrics import BUCKETS_S, buckets_of, metrics_text
from btrfs_ublk.ops.monitor.samples import take_samples
from btrfs_ublk.server import Description, LazySegment
from btrfs_ublk.server.stats import Latency

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


def test_buckets_are_cumulative() -> None:
    latency = Latency(
        sum_ns=10, max_ns=2_000_000, buckets=((9_000, 2), (11_000, 3), (2_000_000, 1))
    )
    buckets = buckets_of(latency)
    counts = [count for _, count in buckets]
    assert counts == sorted(counts) and counts[0] == 2 and counts[1] == 5
    assert buckets[-1] == ("+Inf", 6.0)
    assert len(buckets) == len(BUCKETS_S) + 1
    assert buckets_of(Latency())[-1] == ("+Inf", 0.0)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:9469", "127.0.0.1", 9469), ("[::1]:0", "::1", 0)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "9469", ":9469", "host:", "host:99999", "a:-1", "/run/x"]
)
def test_refuses_addresses(text: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        Address.parse(text)


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


def test_address_in_use() -> None:
    with metrics_server(Address("127.0.0.1", 0)) as server:
        with pytest.raises(BtrfsUblkError, match="cannot listen on 127.0.0.1"):
            metrics_server(Address("127.0.0.1", server.server_port))


@pytest.fixture
def lazy_device(
    sanitized_build: Path,
    sanitized_helpers: None,
    sparse_path: Path,
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


@pytest.fixture
def promtool(tmp_path: Path) -> Callable[..., str]:
    """Runs promtool in ``tmp_path``, and returns what it says."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing: Debian's prometheus has it, of 96 MB")

    def run(*words: object, stdin: str = "") -> str:
        argv = ["promtool", *map(str, words)]
        done = subprocess.run(
            argv, input=stdin, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.thorough
def test_prometheus_takes_all_expressions(
    promtool: Callable[..., str], tmp_path: Path
) -> None:
    said = promtool("check", "rules", MONITORING / "alerts.yml")
    assert f"SUCCESS: {len(alert_rules())} rules found" in said
    shown = [x for x in expressions() if not x.startswith("label_values(")]
    rules = [
        {
            "record": f"shown:{number}",
            "expr": x.replace("$__rate_interval", "1m").replace("$instance", ".*"),
        }
        for number, x in enumerate(shown)
    ]
    groups = {"groups": [{"name": "shown", "rules": rules}]}
    (tmp_path / "shown.yml").write_text(yaml.safe_dump(groups))
    assert f"SUCCESS: {len(shown)} rules" in promtool("check", "rules", "shown.yml")


#: Samples of a minute each, and the alerts after 40 minutes.
FIRING: list[tuple[dict[str, str], set[str]]] = [
    ({'btrfs_ublk_device_up{device="a"}': "0x60"}, {"BtrfsUblkDeviceDown"}),
    ({'btrfs_ublk_device_up{device="a"}': "1x60"}, set()),
    (
        {'btrfs_ublk_errors_total{device="a",kind="file"}': "0+1x60"},
        {"BtrfsUblkReadsFail", "BtrfsUblkMetadataFail"},
    ),
    (
        {'btrfs_ublk_fetch_failures_total{reason="wrong_digest"}': "0+1x60"},
        {"BtrfsUblkWrongContent"},
    ),
    (
        {
            'btrfs_ublk_host_breaker_open{host="one:3128"}': "1x60",
            'btrfs_ublk_host_breaker_open{host="origin:443"}': "1x60",
        },
        {"SiteCacheLeftAlone"},
    ),
    # A quarter of the bytes is the origins; then a tenth; then no cache is there.
    (
        {
            'btrfs_ublk_host_bytes_total{host="one:3128"}': "0+30x60",
            'btrfs_ublk_host_bytes_total{host="origin:443"}': "0+10x60",
            'btrfs_ublk_host_attempts_total{host="one:3128"}': "0+1x60",
        },
        {"SiteCacheBypassed"},
    ),
    (
        {
            'btrfs_ublk_host_bytes_total{host="one:3128"}': "0+90x60",
            'btrfs_ublk_host_bytes_total{host="origin:443"}': "0+10x60",
            'btrfs_ublk_host_attempts_total{host="one:3128"}': "0+1x60",
        },
        set(),
    ),
    (
        {
            'btrfs_ublk_host_bytes_total{host="origin:443"}': "0+10x60",
            'btrfs_ublk_host_attempts_total{host="origin:443"}': "0+1x60",
        },
        set(),
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize("series, firing", FIRING)
def test_alerts_fire(
    promtool: Callable[..., str],
    tmp_path: Path,
    series: dict[str, str],
    firing: set[str],
) -> None:
    names = [rule["alert"] for rule in alert_rules()]
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    case = {
        "interval": "1m",
        "input_series": [{"series": x, "values": y} for x, y in series.items()],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": "40m",
                "exp_samples": [
                    {"labels": f'{{alertname="{name}"}}', "value": 1}
                    for name in names
                    if name in firing
                ],
            }
        ],
    }
    assert firing <= set(names)
    test = {"rule_files": [str(MONITORING / "alerts.yml")], "tests": [case]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", "test.yml")


@pytest.mark.thorough
@pytest.mark.fuse
def test_prometheus_takes_all_metrics(
    promtool: Callable[..., str], lazy_device: tuple[str, Path, VirtualData]
) -> None:
    _, path, _ = lazy_device
    read_direct(path, 4 * UNIT, UNIT)
    promtool("check", "metrics", stdin=metrics_text())


@pytest.mark.fuse
def test_verifies_the_cache_of_a_device(
    lazy_device: tuple[str, Path, VirtualData],
) -> None:
    """With the digests of the map that its server has open, given and pinned."""
    _, path, virtual = lazy_device
    for unit in range(4, 12):
        read_direct(path, unit * UNIT, UNIT)
    argv = ["verify", "-d", str(virtual.directory / "cache"), "--json"]

    def report_of_all() -> Any:
        result = CliRunner().invoke(cache, argv, standalone_mode=False)
        found = json.loads(result.output)
        return found if found["right"] >= 8 else None

    report = wait_until(report_of_all, "not all of it is in the cache")
    assert report["clean"] and not report["unknown"]
    for data in (virtual.directory / "cache").glob("*.data"):
        with data.open("r+b") as file:
            file.write(b"wrong")
    result = CliRunner().invoke(cache, argv, standalone_mode=False)
    assert result.return_value == 1
    assert len(json.loads(result.output)["wrong"]) >= 2
    for unit in (4, 7, 8):
        expected = virtual.content(unit * UNIT, UNIT)
        if isinstance(expected, bytes):
            assert read_direct(path, unit * UNIT, UNIT) == expected
