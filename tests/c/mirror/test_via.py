"""Caches in front of mirrors (docs/design/hosts.md), with fetch-shell, sanitized."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from support.shells import EngineShell, FetchShell, StoreShell, describe, units_of
from support.web_servers import ScriptedServer, ranged, response, scripted_server

UNIT = 64 << 10
#: Hosts agree on a cache for as much of an object.
PART = 4 << 20
PARTS = 12
SIZE = PARTS * PART
ETAG = '"of-the-source"'


def content(offset: int, length: int) -> bytes:
    return bytes([offset // UNIT % 251]) * length


#: All of it is in memory: content() of each unit.
DATA = b"".join(content(at, UNIT) for at in range(0, SIZE, UNIT))


def good(request: str) -> bytes:
    return ranged(request, DATA, f"ETag: {ETAG}")


def header(request: str, name: str) -> str | None:
    found = re.search(rf"(?im)^{name}: (.*)\r$", request)
    return found[1] if found else None


class Site:
    """An origin, caches in front of it, and a fetcher."""

    def __init__(
        self, shell: FetchShell, origin: ScriptedServer, caches: list[ScriptedServer]
    ) -> None:
        self.shell, self.origin, self.caches = shell, origin, caches
        self.urls = [each.url("").rstrip("/") for each in caches]

    def mirror(self, **keys: Any) -> dict[str, Any]:
        return {
            "kind": "http",
            "url": self.origin.url("a/b?c=d"),
            "via": self.urls,
        } | keys

    def add(self, *, pinned: bool = True, **keys: Any) -> int:
        mirror = self.mirror(**keys)
        source = self.shell.add({"size": SIZE, "unit": UNIT, "mirrors": [mirror]})
        if pinned:
            self.shell.pin(source, f"etag {ETAG}")
        return source

    def read(self, source: int, offset: int = 0) -> float:
        answer = self.shell.read(source, offset, UNIT)
        assert answer.data == content(offset, UNIT)
        return answer.ms

    def asked(self) -> tuple[int, list[int]]:
        """Requests since the last time: of the origin, and of each cache."""
        counts = len(self.origin.requests), [len(each.requests) for each in self.caches]
        for each in (self.origin, *self.caches):
            each.requests.clear()
        return counts

    def failures(self) -> dict[str, int]:
        found: dict[str, int] = self.shell.stats()["failures"]
        return {name: count for name, count in found.items() if count}


@contextmanager
def made_site(build: Path, log: Path, count: int) -> Iterator[Site]:
    with ExitStack() as stack:
        origin = stack.enter_context(scripted_server(good))
        caches = [stack.enter_context(scripted_server(good)) for _ in range(count)]
        shell = stack.enter_context(FetchShell(build, log=log))
        yield Site(shell, origin, caches)


@pytest.fixture
def site(
    request: pytest.FixtureRequest, sanitized_build: Path, tmp_path: Path
) -> Iterator[Site]:
    count = getattr(request, "param", 3)
    with made_site(sanitized_build, tmp_path / "log", count) as site:
        yield site


def test_a_cache_gets_the_request_of_its_origin(site: Site, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t0ken\n")
    token.chmod(0o600)
    source = site.add(bearer_token_file=str(token))
    site.read(source, UNIT)
    (request,) = [one for each in site.caches for one in each.requests]
    assert request.startswith("GET /a/b?c=d HTTP/1.1\r\n")
    assert header(request, "host") == f"127.0.0.1:{site.origin.port}"
    assert header(request, "authorization") == "Bearer t0ken"
    assert header(request, "range") == f"bytes={UNIT}-{2 * UNIT - 1}"
    # nginx would begin its slices at the first byte of the object.
    assert header(request, "if-range") is None
    assert site.asked()[0] == 0


def choices(site: Site, source: int) -> list[int]:
    """Which cache is asked for each part of the object."""
    found = []
    for offset in range(0, SIZE, PART):
        site.read(source, offset)
        site.read(source, offset + PART - UNIT)
        origin, caches = site.asked()
        assert origin == 0
        found.append(caches.index(2))  # both units of a part
    return found


def test_hosts_agree_on_a_cache(site: Site) -> None:
    chosen = choices(site, site.add())
    assert len(set(chosen)) > 1
    other = site.mirror(via=site.urls[::-1], url=site.origin.url("a/b?signature=x"))
    assert choices(site, site.add(**other)) == chosen
    # Without one of them, only its part goes elsewhere.
    fewer = choices(site, site.add(via=site.urls[:2]))
    for before, after in zip(chosen, fewer, strict=True):
        assert before in (2, after)
    assert choices(site, site.add(url=site.origin.url("another"))) != chosen


def test_a_cache_that_says_later_is_asked_again(site: Site) -> None:
    """A site cache does so while its origin sends a slice."""
    said: list[str] = []

    def later(request: str) -> bytes:
        said.append(request)
        return response("425 Too Early") if len(said) < 6 else good(request)

    for cache in site.caches:
        cache.script = later
    site.read(site.add())
    origin, caches = site.asked()
    assert (origin, sorted(caches)) == (0, [0, 0, 6])
    assert site.failures() == {"later": 5}
    assert all(each["failures"] == 0 for each in site.shell.stats()["hosts"].values())


@pytest.mark.parametrize("head", ["502 Bad Gateway", "200 OK", "504 Gateway Timeout"])
def test_a_cache_that_fails_is_left_alone(site: Site, head: str) -> None:
    for cache in site.caches:
        cache.script = lambda _: response(head)
    source = site.add()
    for number in range(8):
        site.read(source, number * UNIT)
    origin, caches = site.asked()
    # Three failures each, and then others come first.
    assert (origin, sorted(caches)) == (8, [3, 3, 3])


def test_a_silent_cache_costs_bounded_time(site: Site) -> None:
    end = Event()

    def hang(_: str) -> bytes:
        end.wait()
        return b""

    source = site.add()
    site.read(source)
    _, caches = site.asked()
    site.caches[caches.index(1)].script = hang
    try:
        # All at once: three failures in a row, and the cache is left alone.
        reads = {
            site.shell.begin(source, number * UNIT, UNIT, deadline_s=120): number * UNIT
            for number in range(1, 6)
        }
        for number, answer in site.shell.finish().items():
            assert answer.data == content(reads[number], UNIT)
            assert 900 < answer.ms < 60_000  # at least the wait, and no deadline
        origin, after = site.asked()
        assert (origin, after[caches.index(1)]) == (0, 5)
        site.read(source, 6 * UNIT)
        origin, after = site.asked()
        assert (origin, after[caches.index(1)]) == (0, 0)
    finally:
        end.set()


def test_a_challenge_of_a_cache_is_not_believed(site: Site, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    name = f"127.0.0.1:{site.origin.port}"
    config.write_text('{"auths": {"%s": {"auth": "bWU6c2VjcmV0"}}}' % name)
    config.chmod(0o600)
    with scripted_server(lambda _: response("200 OK", b'{"token": "x"}')) as evil:
        challenge = f'401 Unauthorized\nWWW-Authenticate: Bearer realm="{evil.url()}"'
        for cache in site.caches:
            cache.script = lambda _: response(challenge)
        blob = {
            "kind": "oci",
            "registry": name,
            "repository": "some/image",
            "digest": "sha256:" + "0" * 64,
            "insecure": True,
            "docker_config": str(config),
            "via": site.urls,
        }
        source = site.shell.add({"size": SIZE, "unit": UNIT, "mirrors": [blob]})
        site.read(source)
        assert evil.requests == []
    origin, caches = site.asked()
    assert (origin, sum(caches)) == (1, 1)


PLAIN = "http://cache.example:3128"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"via": "http://cache"}, '"via" must be a list'),
        ({"via": []}, '"via" must be a list'),
        ({"via": [3]}, '"via" must be a list of URLs'),
        ({"via": ["cache:3128"]}, '"via" is no URL with a scheme'),
        ({"via": ["http://cache/path"]}, "more than scheme, host and port"),
        ({"via": ["http://me:pw@cache"]}, "has a user or a password"),
        ({"via": [PLAIN], "bearer_token_file": "/t"}, "without TLS"),
        ({"via": [PLAIN], "via_plain": 1}, '"via_plain" must be true or false'),
    ],
)
def test_bad_keys_are_refused(site: Site, keys: dict[str, Any], words: str) -> None:
    mirror = site.mirror(url="https://origin.example/a", **keys)
    answer = site.shell.ask({"source": {"size": SIZE, "mirrors": [mirror]}})
    assert words in answer["error"]


# With a map, whose digests decide


def digested(url: str, data: bytes, **keys: Any) -> dict[str, Any]:
    units = [unit.hex() for unit in units_of(data, UNIT)]
    source = {"size": len(data), "unit": UNIT, "digests": units}
    return source | {"kind": "http", "url": url} | keys


def wrong(request: str) -> bytes:
    head, _, body = good(request).partition(b"\r\n\r\n")
    return head + b"\r\n\r\n" + b"\xff" * len(body)


@pytest.mark.data
@pytest.mark.parametrize("named", ["in the map", "for the device"])
def test_wrong_bytes_of_a_cache_are_never_delivered(
    sanitized_build: Path, tmp_path: Path, named: str
) -> None:
    data = b"".join(content(at, UNIT) for at in range(0, PART, UNIT))
    with scripted_server(good) as origin, scripted_server(wrong) as cache:
        caches = [cache.url("").rstrip("/")]
        keys: dict[str, Any] = {"via": caches} if named == "in the map" else {}
        with StoreShell(sanitized_build, tmp_path / "map") as store:
            source = digested(origin.url(), data, **keys) | {"size": SIZE}
            source["digests"] += ["00" * 32] * ((SIZE - PART) // UNIT)
            store.add([[0, PART, 0, 0]], source)
        lazy = {"kind": "lazy", "length": PART, "map": str(tmp_path / "map")}
        if named == "for the device":
            lazy["via"] = [{"for": "127.0.0.*", "caches": caches}]
        with EngineShell(sanitized_build, describe(lazy)) as shell:
            for offset in range(0, PART, UNIT):
                assert shell.request(f"read {offset} 4096") == data[offset:][:4096]
            stats = shell.stats()["lazy"][0]["fetcher"]
        units = PART // UNIT
        # It has given three wrong answers in a row, and is left alone.
        assert stats["failures"]["wrong_digest"] == len(cache.requests) == 3
        assert len(origin.requests) == units
        assert stats["read_errors"] == 0
