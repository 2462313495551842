"""A report for maintainers has what they need, and no secrets."""

from __future__ import annotations

import base64
import json
import tarfile
from pathlib import Path

import pytest

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.ops.bugreport import write_report
from btrfs_ublk.ops.bugreport.redact import REDACTED, Redactor, known_secrets

SECRET = "hunter2-is-planted"


@pytest.mark.parametrize(
    "text",
    [
        f"GET https://user:{SECRET}@host/path",
        f"https://{SECRET}@host/",
        f"http://host/path?X-Amz-Signature={SECRET}&x=1 failed",
        f"http://host/path#{SECRET}",
        rf'{{"url": "http:\/\/u:{SECRET}@host\/x"}}',
        f"Authorization: Basic {SECRET}",
        f"< authorization: AWS4-HMAC-SHA256 Credential=a/b, Signature={SECRET}",
        f"Cookie: a={SECRET}; b=2",
        f"sent Bearer {SECRET}",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f"aws_session_token = {SECRET}",
        f"x-amz-security-token: {SECRET}",
        f'"identitytoken": "{SECRET}"',
        f'"auth": "{SECRET}",',
        f"--password '{SECRET}' password='{SECRET}'",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        rf'{{"msg": "{{\"password\": \"{SECRET}\"}}"}}',
        f"http_proxy=alice:{SECRET}@proxy:3128",
        f"ran curl --proxy-password {SECRET} -v",
        "key id AKIAIOSFODNN7EXAMPLE",
        f"eyJhbGciOiJIUzI1NiJ9.{SECRET}.c2ln",
    ],
)
def test_secrets_are_told_by_their_shape(text: str) -> None:
    found = Redactor([]).text(text.replace(f"--password '{SECRET}' ", ""))
    assert REDACTED in found
    assert SECRET not in found and "AKIAIOSFODNN7EXAMPLE" not in found


@pytest.mark.parametrize(
    "text",
    [
        "GET https://host:8443/v2/library/debian/blobs/sha256:0123 206",
        "2026-01-01 supervisor: INFO: server 4711 is ready after 0.1 s",
        "BTRFS info (device loop0): using crc32c (crc32c-intel) checksum algorithm",
        "/var/cache/btrfs-ublk: author of units; 5 tokens",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor([]).text(text) == text


def test_names_tell_in_documents() -> None:
    document = {
        "kind": "http",
        "headers": {"Authorization": SECRET},
        "auths": {"host": {"auth": SECRET}},
        "tokens": 5,
        "root": "00ff",
        "list": [{"secret_key": [SECRET]}, f"http://host/?a={SECRET}"],
        "argv": ["curl", "--password", SECRET, "-v"],
    }
    found = Redactor([]).value(document)
    assert SECRET not in json.dumps(found)
    assert found["tokens"] == 5 and found["root"] == "00ff" and found["kind"] == "http"


def test_secrets_of_this_machine_are_taken_out_wherever_they_are(
    tmp_path: Path,
) -> None:
    pair = base64.b64encode(b"user:docker-password").decode()
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker" / "config.json").write_text(
        json.dumps({"auths": {"host": {"auth": pair}}, "credsStore": "x"})
    )
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = some-key-id\naws_secret_access_key = s3%key\n"
    )
    environment = {
        "HOME": str(tmp_path),
        "MY_TOKEN": "env-token",
        "https_proxy": "http://me:proxy-password@proxy",
        "HTTP_PROXY": "me:plain-password@proxy:3128",
        "SHELL": "/bin/bash",
    }
    redactor = Redactor(known_secrets(environment))
    for word in (pair, "docker-password", "some-key-id", "s3%key"):
        assert redactor.text(f"x {word} y") == f"x {REDACTED} y"
    for word in ("env-token", "proxy-password", "plain-password"):
        assert redactor.text(word) == REDACTED
    assert redactor.text("/bin/bash") == "/bin/bash"


def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    def broken() -> str:
        raise BtrfsUblkError(f"no: token={SECRET}")

    def wrong() -> str:
        raise TypeError(f"token={SECRET}")

    path = tmp_path / "report.tar.gz"
    endless: list[object] = []
    endless.append(endless)
    parts = [("x", broken), ("y", wrong), ("z", lambda: endless), ("last", str)]
    errors = [entry.error or "" for entry in write_report(path, found=parts)]
    assert errors[:2] == [f"no: token={REDACTED}", f"TypeError: token={REDACTED}"]
    assert errors[2].startswith("RecursionError: ") and not errors[3]
    with tarfile.open(path) as tar:
        assert tar.getnames() == [f"report/{name}" for name, _ in parts]


def test_nothing_is_overwritten_or_left(tmp_path: Path) -> None:
    path = tmp_path / "report.tar.gz"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        write_report(path, found=[])
    assert path.read_text() == "mine"

    def interrupted() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_report(tmp_path / "other", found=[("x", interrupted)])
    with pytest.raises(BtrfsUblkError, match="cannot make"):
        write_report(tmp_path / "none" / "x", found=[])
    assert list(tmp_path.iterdir()) == [path]
