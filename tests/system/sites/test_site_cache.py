"""A ring of nginx site caches, real origins behind it, and hosts that ask it."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import trustme
from click.testing import CliRunner
from support.needs import Need
from support.registry import PASSWORD, REGISTRY, USER, Registry, registry_server
from support.s3_server import (
    ACCESS_KEY,
    BUCKET,
    PUBLIC_BUCKET,
    SECRET_KEY,
    WEED,
    s3_server,
)
from support.shells import FetchShell
from support.sites import Ring, check_configuration, ring
from support.web_servers import NGINX, ScriptedServer, ranged, response, scripted_server

from btrfs_ublk.cli.main import command
from btrfs_ublk.errors import UsageError
from btrfs_ublk.ops.site_cache.config import Node, SiteCache

pytestmark = pytest.mark.usefixtures("nginx")

UNIT = 256 << 10
UNITS = 16
SIZE = UNITS * UNIT
DATA = b"".join(hashlib.sha256(b"%d" % n).digest() * (UNIT // 32) for n in range(UNITS))


@pytest.fixture(scope="module")
def nginx(need: Need) -> None:
    need(NGINX)


def served(request: str) -> bytes:
    """Answer as a server of ranges, also to HEAD."""
    if request.startswith("HEAD "):
        return response('200 OK\nETag: "it"', length=SIZE)
    if "range:" not in request.lower():
        return response('200 OK\nETag: "it"', DATA)
    return ranged(request, DATA, 'ETag: "it"')


def gets(origin: ScriptedServer) -> list[str]:
    return [one for one in origin.requests if one.startswith("GET ")]


@pytest.fixture
def origin() -> Iterator[ScriptedServer]:
    with scripted_server(served) as server:
        yield server


@pytest.fixture
def nodes(tmp_path: Path, origin: ScriptedServer) -> Iterator[Ring]:
    url = origin.url("").rstrip("/")
    with ring(tmp_path, 3, origins=[url], slice_bytes=UNIT) as running:
        yield running


@dataclass
class Host:
    """A machine of the site: its fetcher, and what it has read."""

    shell: FetchShell
    source: int

    def read_all(self, *, deadline_s: float = 30) -> float:
        """Read all units at once, and return the longest time in ms."""
        reads = {
            self.shell.begin(self.source, at, UNIT, deadline_s=deadline_s): at
            for at in range(0, SIZE, UNIT)
        }
        answers = self.shell.finish()
        for number, at in reads.items():
            assert answers[number].result == 0
            assert answers[number].data == DATA[at : at + UNIT], at
        return max(answer.ms for answer in answers.values())


def hosts(
    stack: ExitStack, build: Path, mirror: dict[str, Any], count: int, tmp_path: Path
) -> list[Host]:
    made = []
    for number in range(count):
        log = tmp_path / f"log{number}"
        shell = stack.enter_context(FetchShell(build, log=log))
        source = shell.add({"size": SIZE, "unit": UNIT, "mirrors": [mirror]})
        if mirror["kind"] == "http":
            shell.pin(source, 'etag "it"')
        made.append(Host(shell, source))
    return made


def at_once(site: list[Host]) -> float:
    """Have all hosts read all, and return the longest time of a read in ms."""
    longest: list[float] = []
    threads = [
        threading.Thread(target=lambda host=host: longest.append(host.read_all()))
        for host in site
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(longest) == len(site)  # nothing was wrong
    return max(longest)


def mirror_of(origin: ScriptedServer, nodes: Ring) -> dict[str, Any]:
    return {"kind": "http", "url": origin.url(), "via": nodes.urls}


def test_four_hosts_cost_the_origin_one(
    sanitized_build: Path, tmp_path: Path, origin: ScriptedServer, nodes: Ring
) -> None:
    with ExitStack() as stack:
        mirror = mirror_of(origin, nodes)
        at_once(hosts(stack, sanitized_build, mirror, 4, tmp_path))
        ranges = [re.search(r"(?im)^range: (.*)\r$", one) for one in gets(origin)]
        asked = sorted(found[1] for found in ranges if found)
        assert asked == sorted(
            f"bytes={at}-{at + UNIT - 1}" for at in range(0, SIZE, UNIT)
        )
        # Warm, it is asked for nothing; nor with an origin that is gone.
        origin.requests.clear()
        origin.script = lambda _: response("503 Service Unavailable")
        at_once(hosts(stack, sanitized_build, mirror, 2, tmp_path))
        assert gets(origin) == []


@pytest.mark.timing  # a host that waited 2.5 s for a node asks the origin
def test_a_node_that_is_killed(
    sanitized_build: Path, tmp_path: Path, origin: ScriptedServer, nodes: Ring
) -> None:
    with ExitStack() as stack:
        mirror = mirror_of(origin, nodes)
        site = hosts(stack, sanitized_build, mirror, 4, tmp_path)
        site[0].read_all()
        nodes.kill(1)
        at_once(site)
        # Its slices are fetched again, by one of the others.
        assert len(gets(origin)) <= 2 * UNITS


@pytest.mark.thorough
def test_a_ring_with_certificates(
    sanitized_build: Path, tmp_path: Path, origin: ScriptedServer
) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    paths = {name: tmp_path / name for name in ("ca", "certificate", "key", "token")}
    authority.cert_pem.write_to_path(paths["ca"])
    issued.cert_chain_pems[0].write_to_path(paths["certificate"])
    issued.private_key_pem.write_to_path(paths["key"])
    paths["token"].write_text("t0ken\n")
    paths["token"].chmod(0o600)
    with ExitStack() as stack:
        keys: dict[str, Any] = {
            "origins": [origin.url("").rstrip("/")],
            "slice_bytes": UNIT,
            "certificate": paths["certificate"],
            "key": paths["key"],
        }
        nodes = stack.enter_context(ring(tmp_path, 2, **keys))
        mirror = mirror_of(origin, nodes) | {"bearer_token_file": str(paths["token"])}
        trusting = mirror | {"ca_file": str(paths["ca"])}
        at_once(hosts(stack, sanitized_build, trusting, 2, tmp_path))
        assert len(gets(origin)) == UNITS
        assert all("Authorization: Bearer t0ken" in one for one in gets(origin))
        # A cache that nobody vouches for gets no token: the origin is asked.
        origin.requests.clear()
        at_once(hosts(stack, sanitized_build, mirror, 1, tmp_path))
        assert len(gets(origin)) == UNITS


# A registry with tokens


@dataclass
class Site:
    registry: Registry
    nodes: Ring
    digest: str
    config: Path

    @property
    def mirror(self) -> dict[str, Any]:
        return {
            "kind": "oci",
            "registry": self.registry.host,
            "repository": "some/image",
            "digest": self.digest,
            "insecure": True,
            "docker_config": str(self.config),
            "via": self.nodes.urls,
        }

    @property
    def url(self) -> str:
        return f"http://{self.registry.host}/v2/some/image/blobs/{self.digest}"

    @property
    def token(self) -> str:
        return self.registry.tokens.token("repository:some/image:pull")


@pytest.fixture
def site(tmp_path: Path, need: Need) -> Iterator[Site]:
    need(REGISTRY)
    home = tmp_path / "registry"
    home.mkdir()
    config = tmp_path / "config.json"
    with registry_server(home) as registry:
        login = {"username": USER, "password": PASSWORD}
        config.write_text(json.dumps({"auths": {registry.host: login}}))
        config.chmod(0o600)
        keys: dict[str, Any] = {
            "origins": [f"http://{registry.host}"],
            "slice_bytes": UNIT,
        }
        with ring(tmp_path, 2, **keys) as nodes:
            digest = registry.push("some/image", DATA)
            yield Site(registry, nodes, digest, config)


def get(site: Site, authorization: str | None) -> int:
    headers = {"Host": site.registry.host, "Range": f"bytes=0-{UNIT - 1}"}
    if authorization:
        headers["Authorization"] = authorization
    path = site.url.partition(site.registry.host)[2]
    with requests.get(
        site.nodes.urls[0] + path, headers=headers, timeout=30, stream=True
    ) as found:
        return found.status_code


@pytest.mark.thorough
def test_a_registry_behind_a_ring(
    sanitized_build: Path, tmp_path: Path, site: Site
) -> None:
    with ExitStack() as stack:
        all_hosts = hosts(stack, sanitized_build, site.mirror, 3, tmp_path)
        at_once(all_hosts)
        for host in all_hosts:
            names = set(host.shell.stats()["hosts"])
            assert {url.partition("://")[2] for url in site.nodes.urls} & names
    # What is cached is still only for whom the registry allows it.
    assert get(site, None) == 401
    assert get(site, "Bearer x") == 401
    assert get(site, f"Bearer {site.token}") == 206
    other = site.registry.tokens.token("repository:another/image:pull")
    assert get(site, f"Bearer {other}") == 401


def status(nodes: Ring, origin: ScriptedServer, **headers: str) -> int:
    """Ask a node for the first unit of the origin's object."""
    asked = {"Host": f"127.0.0.1:{origin.port}", "Range": f"bytes=0-{UNIT - 1}"}
    url = nodes.urls[0] + "/object"
    with requests.get(
        url, headers=asked | headers, timeout=30, stream=True, allow_redirects=False
    ) as found:
        return found.status_code


def test_who_is_known_by_another_header_asks_the_origin(
    origin: ScriptedServer, nodes: Ring
) -> None:
    """What the origin says to a caller is remembered by Authorization alone."""

    def guarded(request: str) -> bytes:
        return served(request) if "a-cookie" in request else response("403 Forbidden")

    origin.script = guarded
    assert status(nodes, origin, Cookie="a-cookie") == 403
    assert status(nodes, origin, **{"X-Key": "a-cookie"}) == 403
    assert status(nodes, origin) == 403
    origin.script = served
    assert status(nodes, origin, Authorization="Bearer t") == 206


def test_a_redirect_lets_in_only_who_has_a_token(
    origin: ScriptedServer, nodes: Ring
) -> None:
    """It may lead to where the object is, or to a login."""

    def guarded(request: str) -> bytes:
        if request.split()[1] == "/login":
            return response("200 OK", b"who are you?")
        if "Bearer t0ken" in request:
            return served(request)
        return response(f"302 Found\nLocation: {origin.url('login')}")

    origin.script = guarded
    assert status(nodes, origin, Authorization="Bearer t0ken") == 206
    assert status(nodes, origin) == 403


# An S3 store
@pytest.mark.thorough
def test_a_store_behind_a_ring(
    sanitized_build: Path, tmp_path: Path, need: Need
) -> None:
    """Signatures cover Host, so it has to pass."""
    need(WEED)
    keys = tmp_path / "keys"
    keys.write_text(
        f"[default]\naws_access_key_id = {ACCESS_KEY}\n"
        f"aws_secret_access_key = {SECRET_KEY}\n"
    )
    keys.chmod(0o600)
    with ExitStack() as stack:
        (tmp_path / "s3").mkdir()
        store = stack.enter_context(s3_server(tmp_path / "s3"))
        options: dict[str, Any] = {"origins": [store.endpoint], "slice_bytes": UNIT}
        nodes = stack.enter_context(ring(tmp_path, 2, public=True, **options))
        for bucket in (BUCKET, PUBLIC_BUCKET):
            store.put(bucket, "it", DATA)
            login = {"anonymous": True}
            if bucket == BUCKET:
                login = {"credentials_file": str(keys)}  # type: ignore[dict-item]
            mirror = {
                "kind": "s3",
                "endpoint": store.endpoint,
                "bucket": bucket,
                "key": "it",
                "via": nodes.urls,
                **login,
            }
            site = hosts(stack, sanitized_build, mirror, 2, tmp_path)
            for host in site:
                answer = host.shell.ask(
                    {"probe": 1, "source": host.source, "timeout_ms": 9000}
                )
                host.shell.pin(host.source, answer["identity"])
            at_once(site)
            for host in site:
                # Nothing was fetched from the store itself.
                stats = host.shell.stats()["hosts"]
                there = stats.get(store.endpoint.partition("://")[2], {})
                assert there.get("bytes", 0) == 0
                assert sum(each["bytes"] for each in stats.values()) >= SIZE


# The configuration


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"nodes": []}, "a ring needs a node"),
        ({"nodes": [Node("a"), Node("a")]}, "--nodes names a:3128:3130 twice"),
        ({"this": Node("b")}, "--this b:3128:3130 is none of the nodes"),
        ({"max_bytes": 1000}, "--max-size 1000"),
        ({"nodes": [Node("a"), Node("b", 1, 2)]}, "--this"),
        (
            {"origins": ["https://o/path"]},
            "--origin has more than scheme, host and port",
        ),
        ({"certificate": Path("/c")}, "belong together"),
        ({"directory": Path("/a b;")}, "nginx would misunderstand --directory '/a b;'"),
        ({"resolvers": ["dns"]}, "--resolver 'dns' is no address"),
    ],
)
def test_bad_settings_are_refused(keys: dict[str, Any], words: str) -> None:
    good: dict[str, Any] = {
        "nodes": [Node("127.0.0.1")],
        "origins": ["https://o"],
        "slice_bytes": UNIT,
        "max_bytes": 1 << 30,
    }
    with pytest.raises(UsageError, match=re.escape(words)):
        SiteCache(**(good | keys))


def test_the_command_writes_it(tmp_path: Path) -> None:
    output = tmp_path / "conf"
    words = ["--nodes", "127.0.0.1,127.0.0.2", "--origin", "https://o.example:5000"]
    words += ["--unit", "64K", "-o", str(output)]
    result = CliRunner().invoke(command, ["site-cache", "config", *words])
    assert result.exception is None, result.output
    text = output.read_text()
    assert "slice 65536;" in text
    assert "server 127.0.0.2:3130" in text
    assert "allow 127.0.0.2;" in text and "deny all;" in text
    assert '"o.example:5000" https://btrfs_ublk_origin_0;' in text


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_a_large_ring_has_no_long_configuration(tmp_path: Path, count: int) -> None:
    nodes = [Node(f"10.0.{n >> 8}.{n & 255}") for n in range(count)]
    keys: dict[str, Any] = {"resolvers": ["127.0.0.1"], "directory": tmp_path / "c"}
    cache = SiteCache(nodes, ["https://127.0.0.1"], UNIT, 1 << 30, **keys)
    assert len(cache.text().splitlines()) < 300 + 2 * count
    check_configuration(tmp_path, cache)
