"""Images in layouts of real stores: an S3 bucket, and a web server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.images import sealed_image
from support.needs import Need
from support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, WEED, S3Server, s3_server
from support.web_servers import NGINX, WebServer, web_server

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image import layout
from btrfs_ublk.image.access import RegistryAccess, RegistryError
from btrfs_ublk.image.build import BuiltImage
from btrfs_ublk.image.check import check_image
from btrfs_ublk.image.documents import InvalidImageError, describe
from btrfs_ublk.image.layout import Layout, blob_name
from btrfs_ublk.image.policy import Policy, RefusedImageError, Rule
from btrfs_ublk.image.pull import inspect_image, pull_image
from btrfs_ublk.image.reference import Reference, parse_name, parse_reference
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.image.transfer import Pushed, open_repository, push_image

ACCESS = RegistryAccess()
#: Tests share a store, and each has a directory of its own.
PLACE = f"s3://{BUCKET}/images"


@pytest.fixture(scope="module")
def store(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[S3Server]:
    need: Need = request.getfixturevalue("need")
    need(WEED)
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(
    store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3Server]:
    keys = tmp_path / "credentials"
    keys.touch(mode=0o600)
    keys.write_text(
        f"[default]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}"
    )
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield store


@pytest.fixture
def target(bucket: S3Server, request: pytest.FixtureRequest) -> Reference:
    return parse_reference(f"{PLACE}/{request.node.name.partition('[')[0]}:1.0")


def push(image: BuiltImage, target: Reference) -> Pushed:
    layout = Layout.opened(image.name.path)
    with open_repository(target, ACCESS, writing=True) as repository:
        return push_image(layout, layout.find(image.name.tag), target, repository)


def allowed(tmp_path: Path, target: Reference) -> Policy:
    return Policy(tmp_path / "images.toml", (Rule(target.place),))


def command(*args: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "btrfs_ublk.cli.main", "image", *map(str, args)]
    return subprocess.run(argv, text=True, capture_output=True, timeout=120)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://bucket/images", "names no image"),
        ("s3://bucket:1", "names no image"),
        ("s3://b/images:1", "'b' is no bucket"),
        ("https://user:x@example.org/images:1", "names no image"),
        ("https://example.org/a/../b:1", "cannot be the directory"),
        ("https://example.org/a?signature=1:1", "cannot be the directory"),
        ("https://example.org/a%2fb:1", "cannot be the directory"),
        ("s3://bucket/images:.", "is no tag"),
        ("s3://bucket/images@sha256:12", "64 hexadecimal digits"),
    ],
)
def test_names_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_name(text)


def test_a_bucket(target: Reference, tmp_path: Path) -> None:
    """An image goes there once, and comes back as it was; so do others' copies."""
    image = sealed_image(tmp_path / "image")
    pushed = push(image, target)
    assert pushed.uploaded > 3 and pushed.there == 0
    again = push(image, Reference(target.registry, target.repository, "1.1"))
    assert (again.uploaded, again.there) == (0, pushed.uploaded)
    assert again.digest == pushed.digest
    with open_repository(target, ACCESS, writing=True) as repository:
        with pytest.raises(BtrfsUblkError, match="cannot read .*gone: No such file"):
            repository.upload(describe("", b"gone"), tmp_path / "gone")
    store = ImageStore(tmp_path / "store")
    with pytest.raises(RefusedImageError, match="no sealed image may come from s3://"):
        pull_image(target, ACCESS, store, policy=Policy(tmp_path / "none"))
    pulled = pull_image(target, ACCESS, store, policy=allowed(tmp_path, target))
    assert pulled.digest == image.sealed
    assert store.find(str(target)) is not None
    assert inspect_image(target, ACCESS).manifest.digest == image.sealed


@pytest.mark.data
def test_pushes_at_once_lose_no_tag(
    target: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_MAX_CHANGES", 200)
    image = sealed_image(tmp_path / "image")
    push(image, target)
    tags = [f"2.{number}" for number in range(8)]
    targets = [Reference(target.registry, target.repository, tag) for tag in tags]
    with ThreadPoolExecutor(len(tags)) as pool:
        list(pool.map(lambda one: push(image, one), targets))
    with open_repository(target, ACCESS) as repository:
        assert sorted(repository.tags()) == ["1.0", *tags]


def test_what_is_wrong_in_a_bucket(
    target: Reference, bucket: S3Server, tmp_path: Path
) -> None:
    """Each is refused with what an operator needs to know; the store stays empty."""
    store = ImageStore(tmp_path / "store")
    policy = allowed(tmp_path, target)

    def pull(reference: Reference) -> None:
        pull_image(reference, ACCESS, store, policy=policy)

    with pytest.raises(RegistryError, match="is no OCI image layout") as caught:
        pull(target)
    assert caught.value.status == 404
    image = sealed_image(tmp_path / "image")
    push(image, target)
    with pytest.raises(RegistryError, match="has no image '2'") as caught:
        pull(Reference(target.registry, target.repository, "2"))
    assert caught.value.hint == "there are: 1.0"
    with pytest.raises(RegistryError, match="has no manifest sha256:0000"):
        pull(target.at(f"sha256:{64 * '0'}"))
    pack = inspect_image(target, ACCESS).manifest.pack
    key = f"{target.repository}/{blob_name(pack.digest)}"
    bucket.put(BUCKET, key, bytes(pack.size))
    with pytest.raises(InvalidImageError, match=f"answers for blob {pack.digest} with"):
        pull(target)
    bucket.put(BUCKET, f"{target.repository}/{blob_name(image.sealed)}", b"{}")
    with pytest.raises(InvalidImageError, match="it was changed|has for"):
        inspect_image(target, ACCESS)  # what the index embeds is another copy
    bucket.put(BUCKET, f"{target.repository}/index.json", b"[]")
    with pytest.raises(InvalidImageError, match="index.json"):
        pull(target)
    assert store.images() == []


@pytest.mark.data
def test_a_push_that_is_killed_is_repeated(target: Reference, tmp_path: Path) -> None:
    """The name comes last, so that what is not whole has none."""
    image = sealed_image(tmp_path / "image", units=200)
    argv = [sys.executable, "-m", "btrfs_ublk.cli.main", "image", "push"]
    for wait_s in (0.8, 1.2):
        with subprocess.Popen(
            [*argv, str(image.name), str(target)], stderr=subprocess.DEVNULL
        ) as child:
            try:
                child.wait(wait_s)
            except subprocess.TimeoutExpired:
                child.kill()
        with open_repository(target, ACCESS) as repository:
            if repository.tags():
                assert inspect_image(target, ACCESS).manifest.digest == image.sealed
    assert command("push", image.name, target).returncode == 0
    report = check_image(target, ACCESS, with_btrfs_check=False)
    assert report.digest == image.sealed
    assert report.right_units == report.units > 100


@pytest.fixture
def web(need: Need, tmp_path: Path) -> Iterator[WebServer]:
    need(NGINX)
    (tmp_path / "web").mkdir()
    with web_server(tmp_path / "web") as server:
        yield server


def test_a_web_server(web: WebServer, tmp_path: Path) -> None:
    """A layout that was built into the directory which it serves."""
    image = sealed_image(web.root / "files/app")
    access = RegistryAccess(ca_file=web.ca)
    place = web.tls_url("files/app")
    reference = parse_reference(f"{place}:app")
    store = ImageStore(tmp_path / "store")
    pull_image(reference, access, store, policy=allowed(tmp_path, reference))
    assert [x.digest for x in store.images()] == [image.sealed]
    with open_repository(reference, access) as repository:
        assert repository.tags() == ["app"]
    with pytest.raises(UsageError, match="is a web server, which is only read"):
        open_repository(reference, access, writing=True)
    plain = parse_reference(f"{web.url('files/app')}:app")
    with pytest.raises(UsageError, match="is read without TLS"):
        inspect_image(plain, RegistryAccess())
    report = inspect_image(plain, RegistryAccess(insecure=True))
    assert report.manifest.digest == image.sealed
    elsewhere = parse_reference(f"{web.url('files/none')}:app")
    with pytest.raises(BtrfsUblkError, match="is no OCI image layout"):
        inspect_image(elsewhere, RegistryAccess(insecure=True))


def test_no_secret_that_no_header_can_have_is_told(
    target: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "SECRET\n")
    with pytest.raises(UsageError, match="characters that no header") as caught:
        inspect_image(target, ACCESS)
    assert "SECRET" not in f"{caught.value} {caught.value.hint}"
