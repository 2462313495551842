"""A device whose data are at three places at once, each of another kind and behind
credentials; and what becomes of the credentials.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.devices import description_file, device_command, map_command
from support.needs import Need
from support.registry import PASSWORD, REGISTRY, USER, registry_server
from support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, WEED, s3_server
from support.shells import units_of
from support.web_servers import NGINX, web_server

from btrfs_ublk.base.capabilities import FUSE, LOOP
from btrfs_ublk.base.process import run
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.content import Addition, digest_file
from btrfs_ublk.server import BlockServer, Description, LazySegment
from btrfs_ublk.units import KIB

#: One front end: the servers take too long to start in an emulated machine, and what is
#: tested here has nothing to do with it but for what the owner of "fuse" opens.
pytestmark = [pytest.mark.fuse, pytest.mark.usefixtures("in_process")]

UNIT = 64 * KIB
SIZE = 40 * UNIT
DATA = random.Random(6).randbytes(SIZE)
REPOSITORY = "some/image"


@dataclass
class Places:
    """Mirrors of DATA, and what ends the server of each."""

    mirrors: dict[str, dict[str, Any]]
    ends: dict[str, ExitStack]


def _secret(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return str(path)


@contextmanager
def made_places(top: Path) -> Iterator[Places]:
    ends = {kind: ExitStack() for kind in ("http", "oci", "s3")}
    roots = {kind: top / kind for kind in ends}
    for root in roots.values():
        root.mkdir()
    with ExitStack() as stack:
        for end in ends.values():
            stack.enter_context(end)
        web = ends["http"].enter_context(web_server(roots["http"]))
        (web.files / "object").write_bytes(DATA)
        registry = ends["oci"].enter_context(registry_server(roots["oci"]))
        digest = registry.push(REPOSITORY, DATA)
        config = (
            f'"{registry.host}": {{"username": "{USER}", "password": "{PASSWORD}"}}'
        )
        store = ends["s3"].enter_context(s3_server(roots["s3"]))
        store.put(BUCKET, "object", DATA)
        keys = f"aws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n"
        mirrors = {
            "http": {
                "url": web.tls_url("basic/object"),
                "ca_file": str(web.ca),
                "basic_auth_file": _secret(top / "basic", "reader:s3cret\n"),
            },
            "oci": {
                "registry": registry.host,
                "repository": REPOSITORY,
                "digest": digest,
                "insecure": True,
                "docker_config": _secret(
                    top / "config.json", f'{{"auths": {{{config}}}}}'
                ),
            },
            "s3": {
                "endpoint": store.endpoint,
                "bucket": BUCKET,
                "key": "object",
                "credentials_file": _secret(top / "aws", f"[default]\n{keys}"),
            },
        }
        yield Places(mirrors, ends)


@pytest.fixture(scope="module")
def places(need: Need, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    need(FUSE, LOOP, NGINX, REGISTRY, WEED)
    with made_places(tmp_path_factory.mktemp("places")) as made:
        yield made


def test_added_by_command(places: Places, tmp_path: Path) -> None:
    """What the command's options say of a store and of a registry, in one device."""
    digests = tmp_path / "digests"
    (tmp_path / "data").write_bytes(DATA)
    digest_file(tmp_path / "data", unit_bytes=UNIT).write(digests)
    s3, oci = places.mirrors["s3"], places.mirrors["oci"]
    added = [
        ("--s3", f"s3://{BUCKET}/object", "--endpoint", s3["endpoint"], "--path-style")
        + ("--credentials-file", s3["credentials_file"], "--profile", "default"),
        ("--oci", f"{oci['registry']}/{REPOSITORY}@{oci['digest']}", "--insecure")
        + ("--docker-config", oci["docker_config"]),
    ]
    segment = LazySegment(offset=0, length=2 * SIZE, map=str(tmp_path / "map"))
    path = description_file(tmp_path, Description(2 * SIZE, [segment]))
    made = device_command("up", "remote", path, "--front-end", "fuse")
    assert made.returncode == 0, made.stderr
    try:
        for number, options in enumerate(added):
            done = map_command("add", "remote", *options, "--unit", "64K")
            # The size was asked for, of the place that was named.
            assert done.returncode == 0, done.stderr
            assert done.stdout.split()[:2] == [str(number * SIZE), str(SIZE)]
            given = ("--digests", digests, "--offset", str(number * SIZE))
            done = map_command("add", "remote", *options, "--unit", "64K", *given)
            assert done.returncode == 1 and "mapped already" in done.stderr
        assert read_direct(Path(made.stdout.strip()), 0, 2 * SIZE) == DATA * 2
    finally:
        device_command("down", "remote")


def test_goes_on_with_what_is_left(need: Need, tmp_path: Path) -> None:
    need(FUSE, LOOP, NGINX, REGISTRY, WEED)
    segment = LazySegment(
        offset=0, length=SIZE, map=str(tmp_path / "map"), deadline_s=20
    )
    described = Description(SIZE, [segment])
    source: dict[str, Any] = {"size": SIZE, "unit": UNIT}
    source["digests"] = [unit.hex() for unit in units_of(DATA, UNIT)]
    with (
        made_places(tmp_path) as places,
        BlockServer(described, front_end="fuse") as server,
    ):
        source["mirrors"] = [{"kind": x, **y} for x, y in places.mirrors.items()]
        server.map_add([source], [Addition(offset=0, length=SIZE)])
        third = SIZE // 4 // UNIT * UNIT
        for start, gone in enumerate((None, "http", "oci")):
            if gone:
                places.ends[gone].close()
            at = start * third
            assert read_direct(server.device, at, third) == DATA[at : at + third]


@pytest.mark.parametrize("first", ["tls", "plain"])
def test_believes_whom_the_system_does(need: Need, tmp_path: Path, first: str) -> None:
    """By certificates that are read once TLS is wanted, perhaps by a redirect only."""
    need(FUSE, LOOP, NGINX)
    system = Path("/etc/ssl/certs/ca-certificates.crt")
    if not system.is_file():
        pytest.skip(f"certificates of the system are not in {system}")
    segment = LazySegment(offset=0, length=SIZE, map=str(tmp_path / "map"))
    source: dict[str, Any] = {"kind": "http", "proxy": "none", "size": SIZE}
    with web_server(tmp_path) as web, ExitStack() as stack:
        (web.files / "object").write_bytes(DATA)
        run(["mount", "--bind", web.ca, system], timeout_s=10)
        stack.callback(run, ["umount", system], timeout_s=10)
        url = web.tls_url("files/object")
        source["url"] = url if first == "tls" else web.url("to-tls/object")
        server = BlockServer(Description(SIZE, [segment]), front_end="fuse")
        stack.enter_context(server)
        server.map_add([source], [Addition(offset=0, length=SIZE)])
        assert read_direct(server.device, 0, SIZE) == DATA
