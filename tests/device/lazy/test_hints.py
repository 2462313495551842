"""What is said of a source that cannot be asked: the hint is that of the cause."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.devices import MAP_UNIT, map_description
from support.needs import Need
from support.web_servers import NGINX, WebServer, response, scripted_server, web_server

from btrfs_ublk.base.capabilities import FUSE
from btrfs_ublk.content import Addition
from btrfs_ublk.content.maps import Refused
from btrfs_ublk.errors import UsageError
from btrfs_ublk.server import BlockServer

pytestmark = pytest.mark.fuse


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory, need: Need) -> Iterator[WebServer]:
    need(NGINX)
    with web_server(tmp_path_factory.mktemp("web")) as server:
        (server.root / "files/object").write_bytes(bytes(MAP_UNIT))
        (server.root / "files/empty").touch()
        yield server


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, need: Need
) -> Iterator[BlockServer]:
    need(FUSE)
    directory = tmp_path_factory.mktemp("device")
    with BlockServer(map_description(directory), front_end="fuse", queues=1) as server:
        yield server


def refusal(server: BlockServer, **source: Any) -> tuple[str, str]:
    with pytest.raises((Refused, UsageError)) as refused:
        server.map_add([{"unit": MAP_UNIT, **source}], [Addition()])
    return refused.value.message, refused.value.hint or ""


#: What nginx does, or does not have; words of the error; words of the hint.


@pytest.mark.parametrize(
    ("path", "text", "hint"),
    [
        ("basic/object", "status 401", '"basic_auth_file" or a "bearer_token_file"'),
        ("mutual/object", "status 403", "gives it to other users only"),
        ("files/other", "status 404", "check the path in the URL"),
        ("files", "redirects", "name the URL that it ends at"),
        ("loop", "too many redirects", "name the URL that it ends at"),
        ("to-file", "redirects to what is no http", "name the URL that it ends at"),
        ("files/", "status 403", "gives it to other users only"),
        ("busy", "status 503", "does not serve at the moment"),
        ("limited", "status 429", "too much to do"),
        ("broken", "status 500", "its log may say why"),
        ("whole/object", "status 200", "range requests"),
        ("coded/object", "coding 'gzip'", "compresses what it sends"),
        ("coded-whole/object", "coding 'gzip'", "compresses what it sends"),
    ],
)
def test_of_answers(
    server: BlockServer, web: WebServer, path: str, text: str, hint: str
) -> None:
    if path == "files":
        path = "to-plain/object"
        said, advice = refusal(
            server,
            kind="http",
            url=web.tls_url(path),
            ca_file=str(web.root / "ca.pem"),
        )
    else:
        said, advice = refusal(server, kind="http", url=web.url(path))
    assert text in said
    assert hint in advice
    assert '"size"' not in advice


def test_of_certificates(server: BlockServer, web: WebServer, tmp_path: Path) -> None:
    url = web.tls_url("files/object")
    said, advice = refusal(server, kind="http", url=url)
    assert "certificate" in said and '"ca_file"' in advice
    # One for another name is not to be trusted.
    url = f"https://127.0.0.2:{web.tls_port}/files/object"
    ca_file = str(web.root / "ca.pem")
    with ExitStack() as stack:
        listener = socket.create_server(("127.0.0.2", 0))
        stack.callback(listener.close)
    said, advice = refusal(server, kind="http", url=url, ca_file=ca_file)
    assert '"ca_file"' not in advice
    missing = str(tmp_path / "no.pem")
    said, advice = refusal(server, kind="http", url=url, ca_file=missing)
    assert missing in said and "check the path" in advice


def test_of_nobody(server: BlockServer, web: WebServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    said, advice = refusal(server, kind="http", url=f"http://127.0.0.1:{port}/x")
    assert "does the server run, and on that port?" in advice
    said, advice = refusal(server, kind="http", url="http://no-such-host.invalid/x")
    assert "name of the host" in advice
    said, advice = refusal(server, kind="http", url=f"https://127.0.0.1:{web.port}/x")
    assert "write http://" in advice, said
    with scripted_server(lambda _: b"SSH-2.0-OpenSSH_9.2\r\n") as other:
        said, advice = refusal(server, kind="http", url=other.url())
        assert "is it an HTTP server?" in advice, said


def test_of_a_size_that_is_not_said(server: BlockServer) -> None:
    answer = response("206 Partial Content\nContent-Range: bytes 0-0/*", b"x")
    with scripted_server(lambda _: answer) as origin:
        said, advice = refusal(server, kind="http", url=origin.url())
        assert "does not say the object's size" in said and 'give its "size"' in advice


@pytest.mark.parametrize(
    ("status", "source", "hint"),
    [
        (403, {"kind": "s3"}, '"credentials_file"'),
        (404, {"kind": "s3"}, '"bucket" and "key"'),
        (401, {"kind": "oci"}, '"docker_config"'),
        (404, {"kind": "oci"}, '"repository" and "digest"'),
    ],
)
def test_of_stores(
    server: BlockServer, status: int, source: dict[str, str], hint: str
) -> None:
    with scripted_server(lambda _: response(f"{status} No")) as origin:
        of_kind: dict[str, Any] = {
            "bucket": "bucket",
            "key": "k",
            "endpoint": f"http://127.0.0.1:{origin.port}",
            "anonymous": True,
        }
        if source["kind"] == "oci":
            of_kind = {
                "registry": f"127.0.0.1:{origin.port}",
                "repository": "r",
                "digest": "sha256:" + "0" * 64,
                "insecure": True,
            }
        said, advice = refusal(server, **source, **of_kind)
        assert f"status {status}" in said and hint in advice, (said, advice)


def test_of_files(server: BlockServer, web: WebServer, tmp_path: Path) -> None:
    said, advice = refusal(server, kind="file", path=str(tmp_path / "no"))
    assert "No such file" in said and "check the path" in advice
    said, advice = refusal(server, kind="file", path=str(tmp_path))
    assert "is a directory" in said and "name one file in it" in advice
    empty = tmp_path / "empty"
    empty.touch()
    (added,) = server.map_add([{"kind": "file", "path": str(empty)}], [Addition()])
    assert added.length == 0
    said, advice = refusal(server, kind="file", path=str(web.root / "ca.pem"), size=0)
    assert '"size" is 0' in said
    # Credentials that are not there.
    missing = str(tmp_path / "login")
    url = web.url("basic/object")
    said, advice = refusal(server, kind="http", url=url, basic_auth_file=missing)
    assert missing in said and "mode 600" in advice


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        (
            {"kind": "http", "url": "http://user:secret-word@host/x"},
            '"basic_auth_file"',
        ),
        (
            {
                "kind": "s3",
                "bucket": "bucket",
                "key": "k",
                "endpoint": "http://u:secret-word@host",
            },
            '"credentials_file"',
        ),
        (
            {
                "kind": "http",
                "url": "http://host/x",
                "proxy": "http://u:secret-word@host",
            },
            "http_proxy",
        ),
    ],
)
def test_of_logins_in_urls(
    server: BlockServer, source: dict[str, Any], hint: str
) -> None:
    said, advice = refusal(server, **source)
    assert "has a user or a password in it" in said and hint in advice
    assert "secret-word" not in said


def test_of_a_mount_point(tmp_path: Path) -> None:
    """What is there need not be made."""

    def up(target: Path) -> str:
        words = ["volume", "up", "hinted", "--mount", str(target)]
        done = subprocess.run(
            [sys.executable, "-m", "btrfs_ublk.cli.main", *words],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2, done
        return done.stderr

    assert f"mkdir -p {tmp_path / 'no'}" in up(tmp_path / "no/mnt")
    (tmp_path / "file").touch()
    assert "mkdir" not in up(tmp_path / "file/mnt")
