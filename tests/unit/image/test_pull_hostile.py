"""Registries that mean harm: what they cannot make `image pull` do, hold, or keep."""

import gzip
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import tables
from support.images import sealed_image
from support.web_servers import Script, response, scripted_server

from btrfs_ublk.base.private_dirs import CONFIG_VARIABLE
from btrfs_ublk.image import connection as connections
from btrfs_ublk.image.access import RegistryAccess, RegistryError
from btrfs_ublk.image.documents import INDEX, InvalidImageError
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.reference import Reference
from btrfs_ublk.image.store import IMAGES_VARIABLE
from btrfs_ublk.image.transfer import open_repository
from btrfs_ublk.units import MIB

TIMEOUT_S = 60
#: The command takes half of it for itself.
MOST_BYTES = 200 * MIB


@dataclass
class Pull:
    """What `image pull` did."""

    status: int
    said: str
    most_bytes: int
    left: list[Path]


def peak_bytes(pid: int) -> int:
    """Return the most memory that a program has had so far; 0 when it has ended. Unlike
    wait4(2), it leaves out what its parent had when it was forked."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


@pytest.fixture
def pull(tmp_path: Path) -> Callable[[Script], Pull]:
    """Run `image pull` of a registry that answers so."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/images.toml").write_text('[[allow]]\nfrom = "127.0.0.1:*/*"\n')
    environment = os.environ | {
        IMAGES_VARIABLE: str(tmp_path / "store"),
        CONFIG_VARIABLE: str(tmp_path / "etc"),
        "DOCKER_CONFIG": str(tmp_path / "none"),
    }

    def run(script: Script) -> Pull:
        with scripted_server(script) as server:
            argv = [sys.executable, "-m", "btrfs_ublk.cli.main", "image", "pull"]
            argv += ["--insecure", f"127.0.0.1:{server.port}/some/app:1"]
            with (tmp_path / "said").open("wb") as said:
                child = subprocess.Popen(argv, stderr=said, env=environment)
                until_s, most_bytes = time.monotonic() + TIMEOUT_S, 0
                while child.poll() is None:
                    if time.monotonic() > until_s:
                        child.kill()
                    most_bytes = max(most_bytes, peak_bytes(child.pid))
                    time.sleep(0.02)
        left = [x for x in (tmp_path / "store").rglob("*") if x.name != ".lock"]
        return Pull(
            child.returncode,
            (tmp_path / "said").read_text(),
            most_bytes,
            [x for x in left if x.is_file()],
        )

    return run


def refused(done: Pull, said: str) -> None:
    assert (done.status, done.left) == (1, []), done
    assert said in done.said and "Traceback" not in done.said
    assert done.most_bytes < MOST_BYTES


def zeros_packed(size_bytes: int) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    piece = bytes(MIB)
    made = [packer.compress(piece) for _ in range(size_bytes // MIB)]
    return b"".join([*made, packer.flush()])


def without_end(head: str, piece: bytes) -> Iterator[bytes]:
    """Megabytes that are never enough."""
    yield response(head, length=1 << 40)
    while True:
        yield piece


def test_documents_that_were_compressed_for_the_way(
    pull: Callable[[Script], Pull],
) -> None:
    """Twice, it would be 300 MiB in some KiB."""
    bomb = gzip.compress(zeros_packed(300 * MIB))
    head = f"200 OK\nContent-Type: {INDEX}\nContent-Encoding: gzip, gzip"
    done = pull(lambda _: response(head, bomb))
    refused(done, "answers with a Content-Encoding of 'gzip, gzip'")


@pytest.mark.parametrize("status", ["200 OK", "401 No"])
def test_answers_without_an_end(pull: Callable[[Script], Pull], status: str) -> None:
    head = f"{status}\nContent-Type: {INDEX}"
    done = pull(lambda _: without_end(head, b" " * MIB))
    said = "has more than 4194304 bytes" if status == "200 OK" else "HTTP 4"
    refused(done, said)


@pytest.mark.parametrize("what", ["end", "encoding", "depth"])
def test_token_servers(pull: Callable[[Script], Pull], what: str) -> None:
    answers: dict[str, Script] = {
        "end": lambda _: without_end("200 OK", b'{"token": "' + b"x" * MIB),
        "encoding": lambda _: response(
            "200 OK\nContent-Encoding: gzip", zeros_packed(300 * MIB)
        ),
        "depth": lambda _: response("200 OK", b'{"token":' + b"[" * 500_000),
    }

    def registry(request: str) -> bytes | Iterator[bytes]:
        if request.startswith("GET /token"):
            return answers[what](request)  # type: ignore[return-value]
        host = next(x for x in request.splitlines() if x.startswith("Host: "))[6:]
        realm = f'Bearer realm="http://{host}/token",service="x"'
        return response(f"401 No\nWWW-Authenticate: {realm}")

    said = "Content-Encoding of 'gzip'" if what == "encoding" else "without a token"
    refused(pull(registry), said)


@pytest.mark.parametrize(
    "document",
    [
        b"[" * 1_000_000,
        b'{"schemaVersion": 2, "manifests": ' + b"[" * 100_000,
        b'{"schemaVersion": 2, "manifests": [{"size": ' + b"9" * 5000 + b"}]}",
        b'{"schemaVersion": 2, "manifests": [{"mediaType": "x", "digest": "sha256:'
        + b"0" * 64
        + b'", "size": 1e999}]}',
        b'{"schemaVersion": 2, "manifests": [' + b"{}," * 5000 + b"{}]}",
    ],
)
def test_documents(pull: Callable[[Script], Pull], document: bytes) -> None:
    done = pull(lambda _: response(f"200 OK\nContent-Type: {INDEX}", document))
    refused(done, "127.0.0.1")


@pytest.mark.parametrize("case", tables.cases("redirects"), ids=tables.name)
def test_redirections(pull: Callable[[Script], Pull], case: dict[str, Any]) -> None:
    requests: list[str] = []
    answer = tables.redirecting(case, response("404 No"))

    def script(request: str) -> bytes:
        requests.append(request)
        return answer(request)

    done = pull(script)
    said = "HTTP 404" if case["followed"] else "cannot get the manifest 1"
    refused(done, said if case["location"] else "redirects a request more than")
    assert tables.was_followed(requests) == case["followed"]
    assert "p4ss" not in done.said


def test_a_login_is_not_for_where_a_registry_sends_us(tmp_path: Path) -> None:
    login = tmp_path / "config.json"
    login.touch(mode=0o600)
    with scripted_server(lambda _: response("404 No")) as inside:

        def registry(request: str) -> bytes:
            if "Authorization: Basic" not in request:
                return response('401 No\nWWW-Authenticate: Basic realm="x"')
            return response(f"307 There\nLocation: {inside.url('metadata')}")

        with scripted_server(registry) as server:
            host = f"127.0.0.1:{server.port}"
            login.write_text('{"auths": {"%s": {"auth": "dXM6cHc="}}}' % host)
            access = RegistryAccess(docker_config=login, insecure=True)
            with open_repository(Reference(host, "app", "1"), access) as repository:
                with pytest.raises(RegistryError, match="HTTP 404"):
                    repository.document("1")
        (asked,) = inside.requests
    assert "authorization" not in asked.lower()


def test_a_byte_now_and_then_does_not_hold_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_LONGEST_S", 0.5)
    monkeypatch.setattr(connections, "_LEAST_BYTES_PER_S", 64 * MIB)

    def registry(_: str) -> Iterator[bytes]:
        yield response("200 OK", length=10_000)
        while True:
            yield b" "
            time.sleep(0.1)

    with scripted_server(registry) as server:
        host = f"127.0.0.1:{server.port}"
        access = RegistryAccess(insecure=True)
        with open_repository(Reference(host, "app", "1"), access) as repository:
            with pytest.raises(RegistryError, match="breaks at byte"):
                repository.document("1")


def test_a_link_where_a_layout_has_its_index(tmp_path: Path) -> None:
    made = sealed_image(tmp_path / "image")
    layout = Layout.opened(made.name.path)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (layout.path / "index.json").unlink()
    (layout.path / "index.json").symlink_to(mine)
    with pytest.raises(InvalidImageError, match="is not JSON"):
        layout.find("app")
    (layout.path / "blobs/sha256").rename(tmp_path / "elsewhere")
    (layout.path / "blobs/sha256").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Exception, match="cannot write to image layout"):
        layout.add(INDEX, b"{}")
    assert mine.read_text() == "mine"
