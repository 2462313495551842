"""Images in a real registry: pushed, looked at, pulled, and used by other clients."""

import base64
import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import tables
from support.images import sealed_image
from support.needs import Need
from support.registry import (
    PASSWORD,
    REGISTRY,
    USER,
    Registry,
    registry_fixture,
    registry_server,
)
from support.waiting import wait_until
from support.web_servers import response, scripted_server

from btrfs_ublk.errors import UsageError
from btrfs_ublk.image import connection
from btrfs_ublk.image.access import RegistryAccess, RegistryError
from btrfs_ublk.image.build import BuiltImage
from btrfs_ublk.image.documents import InvalidImageError, describe, describe_blob
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.policy import Policy, RefusedImageError, Rule
from btrfs_ublk.image.pull import inspect_image, pull_image
from btrfs_ublk.image.reference import Reference, parse_reference
from btrfs_ublk.image.repository import Repository
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.image.transfer import Pushed, fetch_blob, open_repository, push_image

AUTH = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


registry = registry_fixture()


@pytest.fixture(autouse=True)
def as_usual(request: pytest.FixtureRequest) -> None:
    if "registry" in request.fixturenames:
        tokens = request.getfixturevalue("registry").tokens
        tokens.anonymous, tokens.expires_in_s, tokens.life_s = False, 300, 300
        tokens.requests.clear()


def config(path: Path, registry: str, entry: object) -> Path:
    path.touch(mode=0o600)
    path.write_text(json.dumps({"auths": {registry: entry}}), encoding="utf-8")
    return path


@pytest.fixture
def access(registry: Registry, tmp_path: Path) -> RegistryAccess:
    login = config(tmp_path / "config.json", registry.host, {"auth": AUTH})
    return RegistryAccess(docker_config=login, insecure=True)


@pytest.fixture
def target(registry: Registry, request: pytest.FixtureRequest) -> Reference:
    """A repository of the test's own."""
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    return Reference(registry.host, f"tests/{name}", "app")


def pushed(
    image: BuiltImage,
    target: Reference,
    access: RegistryAccess,
    mount_from: str | None = None,
) -> Pushed:
    layout = Layout.opened(image.name.path)
    with open_repository(target, access, writing=True) as repository:
        return push_image(
            layout,
            layout.find(image.name.tag),
            target,
            repository,
            mount_from=mount_from,
        )


def allowing(target: Reference) -> Policy:
    return Policy(Path("/nowhere"), (Rule(target.place),))


def test_pull_moves_metadata_only(
    target: Reference, access: RegistryAccess, tmp_path: Path
) -> None:
    image = sealed_image(tmp_path / "image")
    pushed(image, target, access)
    store = ImageStore(tmp_path / "store")
    pulled = pull_image(target, access, store, policy=allowing(target))
    assert pulled.digest == image.sealed
    assert image.pack_bytes < pulled.fetched_bytes < image.pack_bytes + 4096
    found = store.find(str(target))
    assert found is not None and found.data_bytes == image.data_bytes
    assert store.header(found.digest).fsid == image.fsid
    # Nothing is fetched again but what says that it is the same.
    again = pull_image(target, access, store, policy=allowing(target))
    assert again.fetched_bytes < 4096
    assert [one.names for one in store.images()] == [(str(target),)]


def test_by_digest_no_policy_is_needed(
    target: Reference, access: RegistryAccess, tmp_path: Path
) -> None:
    image = sealed_image(tmp_path / "image")
    pushed(image, target, access)
    store, policy = ImageStore(tmp_path / "store"), Policy(tmp_path / "images.toml")
    with pytest.raises(RefusedImageError, match="there is no .*images.toml"):
        pull_image(target, access, store, policy=policy)
    assert store.images() == []
    for digest in (image.digest, image.sealed):
        pulled = pull_image(target.at(digest), access, store, policy=policy)
        assert pulled.digest == image.sealed
        assert pulled.why == "named by its digest"


def test_tokens_that_expire_are_renewed(
    registry: Registry, target: Reference, access: RegistryAccess, tmp_path: Path
) -> None:
    registry.tokens.life_s = -3600
    image = sealed_image(tmp_path / "image")
    with pytest.raises(RegistryError, match="HTTP 401"):
        pushed(image, target, access)
    registry.tokens.life_s, registry.tokens.expires_in_s = 300, 1
    assert pushed(image, target, access).digest == image.digest


def test_a_blob_is_there_if_the_registry_says_where(tmp_path: Path) -> None:
    """The store's URL is signed for GET, and refuses HEAD, as S3 does."""

    def stored(request: str) -> bytes:
        return response("200 OK", b"x") if request[:4] == "GET " else response("403 No")

    with scripted_server(stored) as store:
        there = f"307 There\nLocation: {store.url('blob?signature=of-get')}"
        gone = f"sha256:{'1' * 64}"
        with scripted_server(
            lambda request: response("404 No" if gone in request else there)
        ) as home:
            target = Reference(f"127.0.0.1:{home.port}", "some/image", "app")
            access = RegistryAccess(docker_config=None, insecure=True)
            with open_repository(target, access, writing=True) as repository:
                assert repository.has(describe_blob("", f"sha256:{'0' * 64}", 1))
                assert not repository.has(describe_blob("", gone, 1))
                layout, one = Layout.made(tmp_path / "layout"), describe("x/y", b"x")
                fetch_blob(layout, repository, one)
    assert layout.blob(one.digest).read_bytes() == b"x"
    # The store gets to know whose blob it is, but not which one.
    assert f"\r\nReferer: {home.url('')}\r\n" in store.requests[-1]
    assert "Referer" not in "".join(home.requests)


@pytest.mark.parametrize("case", tables.cases("retry_after"), ids=tables.name)
def test_when_to_ask_again(case: dict[str, Any]) -> None:
    at_least_s, at_most_s = case["wait_s"] or (7, 7)
    found = connection.retry_after_s(tables.retry_after(case), 7.0)
    assert at_least_s <= found <= at_most_s


def test_a_registry_is_not_asked_before_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it waited for where that takes too long."""
    waited: list[float] = []
    really_sleep = time.sleep

    def sleep(duration_s: float) -> None:
        """Others may have a token until then: that is looked at often."""
        if duration_s < 1:
            really_sleep(duration_s)
        else:
            waited.append(duration_s)

    monkeypatch.setattr(connection.time, "sleep", sleep)
    later = ["20", "3600"]

    def answer(request: str) -> bytes:
        if "GET /token" in request and later:
            return response(f"429 Later\nRetry-After: {later.pop(0)}")
        if "GET /token" in request:
            return response("200 OK", b'{"token": "t0ken"}')
        if "Bearer t0ken" not in request:
            return response('401 No\nWWW-Authenticate: Bearer realm="/token"')
        return response("503 Later\nRetry-After: 61")

    with scripted_server(answer) as home:
        target = Reference(f"127.0.0.1:{home.port}", "some/image", "app")
        access = RegistryAccess(
            docker_config=config(tmp_path / "c", target.registry, {}), insecure=True
        )
        for asked in ("3600 s", "61 s"):
            with pytest.raises(RegistryError) as refused:
                inspect_image(target, access)
            assert refused.value.hint and f"again in {asked}" in refused.value.hint
    assert waited == [20.0]


def test_http_is_for_loopback_only() -> None:
    with pytest.raises(UsageError, match="--insecure is for registries on loopback"):
        open_repository(
            parse_reference("registry.example.org/a:b"), RegistryAccess(insecure=True)
        )


def test_tls_is_verified(need: Need, tmp_path: Path) -> None:
    need(REGISTRY)
    with registry_server(tmp_path, tls=True) as server:
        target = Reference(server.host, "some/image", "app")
        image = sealed_image(tmp_path / "image")
        with pytest.raises(RegistryError, match="certificate is not valid") as refused:
            pushed(image, target, RegistryAccess())
        assert refused.value.hint and "--ca-file" in refused.value.hint
        access = RegistryAccess(ca_file=server.ca_file)
        assert pushed(image, target, access).digest == image.digest
        assert inspect_image(target, access).manifest.digest == image.sealed


def test_a_download_goes_on_where_an_earlier_one_ended(
    registry: Registry, target: Reference, access: RegistryAccess, tmp_path: Path
) -> None:
    data = random.Random(4).randbytes(3_000_000)
    one = describe("application/octet-stream", data)
    registry.push(target.repository, data)
    part = tmp_path / "part"
    part.write_bytes(data[:2_000_000])
    with open_repository(target, access) as repository:
        repository.download(one, part)
        assert part.read_bytes() == data
        part.write_bytes(b"x" + data[1:2_000_000])
        with pytest.raises(InvalidImageError, match=f"answers for blob {one.digest}"):
            repository.download(one, part)
    assert not part.exists()


@pytest.mark.parametrize("answer", ["right", "wrong", "too much", "404 Not Found"])
def test_pull_asks_a_cache_for_the_metadata(
    target: Reference, access: RegistryAccess, tmp_path: Path, answer: str
) -> None:
    image = sealed_image(tmp_path / "image")
    pushed(image, target, access)

    def cache(request: str) -> bytes:
        digest = request.split()[1].rpartition("/sha256:")[2]
        blob = (image.name.path / "blobs/sha256" / digest).read_bytes()
        bodies = {"right": blob, "wrong": bytes(len(blob)), "too much": blob * 2}
        if answer not in bodies:
            return response(answer)
        return response("200 OK", bodies[answer])

    with scripted_server(cache) as server:
        access = replace(access, via=(server.url("").rstrip("/"),))
        store = ImageStore(tmp_path / "store")
        pulled = pull_image(target, access, store, policy=allowing(target))
    assert pulled.digest == image.sealed
    found = store.find(str(target))
    assert found is not None and found.pack.stat().st_size == image.pack_bytes
    assert len(server.requests) == 1
    for request in server.requests:
        assert f"Host: {target.registry}\r\n" in request
        assert "Authorization: Bearer " in request


def _written_below(directory: Path) -> bool:
    """Whether we have an open file of some size there, maybe without a name."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if Path(os.readlink(link)).parent == directory and link.stat().st_size:
                return True
    return False


@pytest.mark.data
def test_what_a_cache_sends_is_apart_until_it_is_verified(
    target: Reference, access: RegistryAccess, tmp_path: Path, registry: Registry
) -> None:
    """A killed download must not go on from a cache's bytes with the registry."""
    data = random.Random(5).randbytes(6_000_000)
    one = describe("application/octet-stream", data)
    registry.push(target.repository, data)
    path = tmp_path / "new" / "part"
    path.parent.mkdir()
    seen: list[Path] = []

    def cache(_: str) -> Iterator[bytes]:
        sent = response("200 OK", data)
        yield sent[:4_000_000]
        wait_until(lambda: _written_below(path.parent), "nothing was written")
        # Nothing has a name, so a kill would leave nothing.
        seen.extend(path.parent.iterdir())
        yield sent[4_000_000:]

    with scripted_server(cache) as server:
        access = replace(access, via=(server.url("").rstrip("/"),))
        with open_repository(target, access) as repository:
            repository.download(one, path)
    assert seen == []
    assert path.read_bytes() == data
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.data
def test_two_that_fetch_one_blob(
    access: RegistryAccess,
    target: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Into one layout, as two builds of images that share a layer do: the second one
    waits, and finds it there."""
    source, layout = Layout.made(tmp_path / "source"), Layout.made(tmp_path / "layout")
    one = source.add("application/octet-stream", random.Random(1).randbytes(1 << 20))
    with open_repository(target, access, writing=True) as repository:
        repository.upload(one, source.blob(one.digest))
    download = Repository.download
    asked = threading.Semaphore(0)

    def slow(self: Repository, *args: object) -> None:
        asked.release()
        time.sleep(0.3)  # while it is fetched, the other one comes
        download(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Repository, "download", slow)

    def fetch() -> None:
        with open_repository(target, access) as repository:
            fetch_blob(layout, repository, one)

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(fetch) for _ in range(2)]:
            each.result(timeout=30)
    assert asked.acquire(blocking=False) and not asked.acquire(blocking=False)
    assert layout.verify(one)
    assert not list((layout.path / "blobs").glob(".part-*"))
