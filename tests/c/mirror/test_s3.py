"""Objects of a real S3 store, with signed requests."""

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest
from support.needs import Need
from support.s3_server import (
    ACCESS_KEY,
    BUCKET,
    PUBLIC_BUCKET,
    SECRET_KEY,
    WEED,
    S3Server,
    s3_server,
)
from support.shells import MirrorShell
from support.web_servers import response, scripted_server

SIZE = 300_000
UNIT = 64 << 10
DATA = random.Random(3).randbytes(SIZE)
#: All that has to be escaped, and what must not be.
KEY = "a dir/ünd+more/100%_~x(1).img"

Shell = Callable[..., MirrorShell]
KEYS = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "s3cr3t"}


@pytest.fixture(scope="module")
def store(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[S3Server]:
    need: Need = request.getfixturevalue("need")
    need(WEED)
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        for bucket in (BUCKET, PUBLIC_BUCKET):
            server.put(bucket, "object", DATA)
            server.put(bucket, quote(KEY, safe="/~"), DATA)
        yield server


@pytest.fixture
def shell(sanitized_build: Path, tmp_path: Path) -> Shell:
    """shell(endpoint, bucket, key, **keys)"""

    def make(
        endpoint: str,
        bucket: str,
        key: str,
        environment: Mapping[str, str] | None = None,
        **keys: object,
    ) -> MirrorShell:
        keys |= {"kind": "s3", "endpoint": endpoint, "bucket": bucket, "key": key}
        variables = {"HOME": str(tmp_path), **(environment or {})}
        return MirrorShell(sanitized_build, keys, size=SIZE, environment=variables)

    return make


def credentials(
    path: Path, *, profile: str = "default", secret: str = SECRET_KEY
) -> str:
    path.touch(mode=0o600)
    path.write_text(
        "# not these\n[other]\naws_access_key_id = x\naws_secret_access_key = y\n"
        f"[{profile}]\naws_access_key_id={ACCESS_KEY}\n"
        f"  aws_secret_access_key = {secret}  \nregion = nowhere\n",
        encoding="utf-8",
    )
    return str(path)


@pytest.mark.parametrize("path_style", [True, False])
@pytest.mark.parametrize("key", ["object", KEY])
def test_reads_with_a_signature(
    shell: Shell, store: S3Server, tmp_path: Path, key: str, path_style: bool
) -> None:
    file = credentials(tmp_path / "credentials")
    keys = {"credentials_file": file, "path_style": path_style}
    bucket = BUCKET if path_style else PUBLIC_BUCKET
    with shell(store.endpoint, bucket, key, **keys) as mirror:
        probed = mirror.probe()
        assert probed["size"] == SIZE
        assert probed["identity"].startswith('etag "')
        mirror.check_all(DATA)


def test_signs_a_session_and_names_a_version(shell: Shell) -> None:
    keys = KEYS | {"AWS_SESSION_TOKEN": "s3ssion"}
    answer = response(f'206 P\nETag: "x"\nContent-Range: bytes 0-9/{SIZE}', DATA[:10])
    with scripted_server(lambda _: answer) as server:
        endpoint = f"http://127.0.0.1:{server.port}/"
        extra = {"region": "eu-test-1", "version_id": "a/b=", "environment": keys}
        with shell(endpoint, "bucket", "../k", **extra) as mirror:
            assert mirror.fetch(0, 10).data == DATA[:10]
    request = server.requests[0]
    assert request.startswith("GET /bucket/../k?versionId=a%2Fb%3D HTTP/1.1\r\n")
    assert "\r\nx-amz-security-token: s3ssion\r\n" in request
    signed = request.split("SignedHeaders=")[1].split(",")[0]
    assert {"host", "x-amz-date", "x-amz-security-token"} <= set(signed.split(";"))
    assert "/eu-test-1/s3/aws4_request" in request
    assert "s3cr3t" not in request


def _error(code: str, message: str) -> bytes:
    """Return the body of a refusal, as Amazon writes it."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message>"
        "<RequestId>4442587FB7D0A2F9</RequestId></Error>"
    ).encode()


@pytest.mark.usefixtures("carrier")
@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (
            403,
            _error("AccessDenied", "Who are &quot;you&quot; &amp; why?\n"),
            'HTTP status 403, AccessDenied: Who are "you" & why?',
        ),
        (400, b"<Error><Code>ExpiredToken</Code>", "HTTP status 400, ExpiredToken"),
        (404, b"<html>no such thing", "HTTP status 404"),
        (404, b"", "HTTP status 404"),
        (503, b"<Code>SlowDown</Code>" + b"x" * 200_000, "HTTP status 503"),
        # Amazon names the region's endpoint in the body alone.
        (
            301,
            _error("PermanentRedirect", "Use another endpoint."),
            "HTTP status 301, PermanentRedirect: Use another endpoint.",
        ),
    ],
)
def test_quotes_what_the_store_says(
    shell: Shell, status: int, body: bytes, text: str
) -> None:
    with scripted_server(lambda _: response(f"{status} No", body)) as server:
        endpoint = f"http://127.0.0.1:{server.port}"
        with shell(endpoint, "bucket", "k", environment=KEYS) as mirror:
            got = mirror.fetch(0, 10)
            probed = mirror.probe()
    for said in (got.text, probed["text"]):
        assert said.removeprefix(f"{endpoint}/bucket/k: ") == text


def test_quotes_nothing_that_is_no_text(shell: Shell) -> None:
    body = b"<Code>\x00\xff\x1b[31m</Code><Message>" + b"m" * 5000 + b"</Message>"
    with scripted_server(lambda _: response("403 No", body)) as server:
        with shell(f"http://127.0.0.1:{server.port}", "bucket", "k") as mirror:
            assert mirror.fetch(0, 10).failure == "no_login"
        keys = {"anonymous": True}
        with shell(f"http://127.0.0.1:{server.port}", "bucket", "k", **keys) as mirror:
            said = mirror.fetch(0, 10).text
    assert said.endswith("HTTP status 403") and said.isprintable()
