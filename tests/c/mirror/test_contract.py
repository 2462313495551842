"""What holds for all kinds of mirrors that fetch: one object, at each kind of place."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.needs import Need
from support.registry import REGISTRY, registry_server
from support.s3_server import PUBLIC_BUCKET, WEED, s3_server
from support.shells import MirrorShell, refusal
from support.web_servers import NGINX, web_server

#: Neither a multiple of a unit nor of a block.
SIZE = 1_000_001
DATA = random.Random(4).randbytes(SIZE)

#: Keys of a mirror of the object, and of one that is not there.
Place = tuple[dict[str, object], dict[str, object]]


def _file(root: Path, stack: ExitStack) -> Place:
    (root / "object").write_bytes(DATA)
    return {"path": str(root / "object")}, {"path": str(root / "none")}


def _http(root: Path, stack: ExitStack) -> Place:
    web = stack.enter_context(web_server(root))
    (web.files / "object").write_bytes(DATA)
    return {"url": web.url("files/object")}, {"url": web.url("files/none")}


def _https(root: Path, stack: ExitStack) -> Place:
    web = stack.enter_context(web_server(root))
    (web.files / "object").write_bytes(DATA)
    ca = {"ca_file": str(web.ca)}
    there, none = web.tls_url("files/object"), web.tls_url("files/none")
    return {"url": there, **ca}, {"url": none, **ca}


def _s3(root: Path, stack: ExitStack) -> Place:
    store = stack.enter_context(s3_server(root))
    store.put(PUBLIC_BUCKET, "object", DATA)
    keys = {"endpoint": store.endpoint, "bucket": PUBLIC_BUCKET, "anonymous": True}
    return {**keys, "key": "object"}, {**keys, "key": "none"}


def _oci(root: Path, stack: ExitStack) -> Place:
    registry = stack.enter_context(registry_server(root))
    registry.tokens.anonymous = True
    digest = registry.push("some/image", DATA)
    keys = {"registry": registry.host, "repository": "some/image", "insecure": True}
    return {**keys, "digest": digest}, {**keys, "digest": f"sha256:{'0' * 64}"}


PLACES: dict[str, Callable[[Path, ExitStack], Place]] = {
    "file": _file,
    "http": _http,
    "https": _https,
    "s3": _s3,
    "oci": _oci,
}
NEEDS = {"http": NGINX, "https": NGINX, "s3": WEED, "oci": REGISTRY}

Shell = Callable[[dict[str, object]], MirrorShell]


@pytest.fixture(scope="module", params=PLACES)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Place]]:
    name: str = request.param
    need: Need = request.getfixturevalue("need")
    if name in NEEDS:
        need(NEEDS[name])
    with ExitStack() as stack:
        root = tmp_path_factory.mktemp(name)
        yield name.replace("https", "http"), PLACES[name](root, stack)


@pytest.fixture
def shell(
    sanitized_build: Path, tmp_path: Path, place: tuple[str, Place]
) -> Iterator[Shell]:
    with ExitStack() as stack:

        def make(keys: dict[str, object]) -> MirrorShell:
            whole = {"kind": place[0], **keys}
            return stack.enter_context(MirrorShell(sanitized_build, whole, size=SIZE))

        yield make


def test_is_what_it_is(shell: Shell, place: tuple[str, Place]) -> None:
    mirror = shell(place[1][0])
    probed = mirror.probe()
    assert (probed["result"], probed["size"]) == (0, SIZE)
    choice = random.Random(5)
    ranges = [(0, 1), (0, SIZE), (SIZE - 1, 1), (SIZE - 4097, 4097)]
    for _ in range(20):
        offset = choice.randrange(SIZE)
        ranges.append((offset, choice.randint(1, SIZE - offset)))
    for offset, length in ranges:
        answer = mirror.fetch(offset, length)
        assert answer.data == DATA[offset : offset + length], answer.text
        assert answer.identity == probed["identity"]


def test_many_at_once(shell: Shell, place: tuple[str, Place]) -> None:
    length = SIZE // 100
    answers = shell(place[1][0]).fetch_many(0, length, 100, timeout_ms=60_000)
    assert b"".join(x.data or b"" for x in answers) == DATA[: 100 * length]


def test_knows_it_again(shell: Shell, place: tuple[str, Place]) -> None:
    mirror = shell(place[1][0])
    identity = mirror.probe()["identity"]
    if identity is None:
        assert place[0] == "oci"  # whose name is that of its content
        return
    mirror.pin(identity)
    assert mirror.fetch(4096, 4096).data == DATA[4096:8192]
    mirror.pin(f"{identity.replace('etag ', 'etag not-')} or another")
    answer = mirror.fetch(4096, 4096)
    assert (answer.failure, answer.data) == ("changed", None)


def test_is_not_there(shell: Shell, place: tuple[str, Place]) -> None:
    mirror = shell(place[1][1])
    answer = mirror.fetch(0, 4096)
    assert (answer.failure, answer.data) == ("gone", None)
    assert answer.text
    probed = mirror.probe()
    assert probed["result"] < 0
    assert probed["text"]


def test_ends_when_it_is_given_up(shell: Shell, place: tuple[str, Place]) -> None:
    """It may have been quicker; then it is right."""
    answer = shell(place[1][0]).cancel(0, SIZE, after_ms=0)
    assert answer.result in (0, -125)
    assert answer.data in (None, DATA)


#: Keys that are right, by kind, and what is said of those that take their place.
RIGHT: dict[str, dict[str, object]] = {
    "http": {},
    "s3": {"bucket": "bucket", "key": "k"},
    "oci": {"registry": "localhost:5000", "repository": "x", "insecure": True}
    | {"digest": f"sha256:{'0' * 64}"},
}
HERE = {"url": "http://localhost/x"}


@pytest.mark.parametrize(
    ("kind", "keys", "text"),
    [
        ("http", {}, '"url"'),
        ("http", {"url": "http://h/x", "url_file": "/u"}, "exclude each other"),
        ("http", {"url_file": "u"}, "no absolute path"),
        ("http", {"url": "object"}, "no URL with a scheme"),
        ("http", {"url": "file:///etc/passwd"}, "must be http or https"),
        ("http", {"url": "http://localhost:99999/x"}, "is no valid URL"),
        ("http", {"url": "http://u:p4ss@localhost/x"}, "a user or a password"),
        ("http", {"url": "http://localhost/x#y"}, "fragment"),
        ("http", HERE | {"ca_file": "ca.pem"}, "no absolute path"),
        (
            *("http", HERE | {"proxy": "http://u:p4ss@h:1"}),
            "in the environment of the server: http_proxy",
        ),
        (
            *("http", HERE | {"bearer_token_file": "/a", "basic_auth_file": "/b"}),
            "exclude each other",
        ),
        ("s3", {"bucket": "a/b"}, '"bucket"'),
        ("s3", {"key": "k" * 1025}, "the limit is 1024"),
        ("s3", {"endpoint": "ftp://localhost"}, "http or https"),
        ("s3", {"endpoint": "http://k:s@localhost"}, "a user or a password"),
        ("s3", {"endpoint": "http://localhost/path"}, "more than scheme and host"),
        ("s3", {"credentials_file": "relative"}, "no absolute path"),
        ("s3", {"anonymous": True, "profile": "x"}, "exclude each other"),
        ("oci", {"registry": "far.invalid"}, '"insecure" is for registries on loop'),
        ("oci", {"registry": "user@localhost"}, "no host[:port]"),
        ("oci", {"repository": "../x"}, '"repository"'),
        ("oci", {"digest": "sha256:abc"}, "64 hexadecimal digits"),
        ("oci", {"digest": f"sha256:{'G' * 64}"}, "64 hexadecimal digits"),
        ("oci", {"docker_config": "config.json"}, "no absolute path"),
        ("oci", {"namespace": "docker.io&x=1"}, "no host[:port]"),
        ("oci", {"path": "/v2/../x"}, "names without"),
        ("oci", {"path": "/v2/"}, "names without"),
    ],
)
def test_refuses_wrong_keys(
    sanitized_build: Path, kind: str, keys: dict[str, object], text: str
) -> None:
    keys = {"kind": kind} | RIGHT[kind] | keys
    said = refusal(MirrorShell, sanitized_build, keys, size=4096, statuses=[2])
    assert text in said and "p4ss" not in said
