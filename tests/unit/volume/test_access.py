"""Options of ``btrfs-ublk volume up`` about all files of one command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from btrfs_ublk.errors import UsageError
from btrfs_ublk.volume.access import Access
from btrfs_ublk.volume.entry import VolumeFile

_FILES = [
    VolumeFile.parse("a=s3://bucket/key"),
    VolumeFile.parse("b=https://example.org/b"),
    VolumeFile.parse("c=/a/file"),
]


def test_each_source_gets_what_it_can_have() -> None:
    access = Access(
        endpoint="https://s3.example.org",
        credentials_file=Path("/etc/s3"),
        basic_auth_file=Path("/etc/basic"),
        ca_file=Path("/etc/ca.pem"),
    )
    s3, http, file = (each.source for each in access.given_to(_FILES, {}))
    assert s3["endpoint"] == "https://s3.example.org"
    assert s3["credentials_file"] == "/etc/s3" and s3["ca_file"] == "/etc/ca.pem"
    assert http["basic_auth_file"] == "/etc/basic" and "endpoint" not in http
    assert file == {"kind": "file", "path": "/a/file"}


def test_what_a_source_says_itself_stays() -> None:
    own = VolumeFile.parse(
        'a={"kind": "s3", "bucket": "b", "key": "k", "endpoint": "https://own"}'
    )
    (made,) = Access(endpoint="https://other").given_to([own], {})
    assert made.source["endpoint"] == "https://own"


def test_the_endpoint_may_come_from_the_environment() -> None:
    environment = {
        "AWS_ENDPOINT_URL": "https://all",
        "AWS_ENDPOINT_URL_S3": "https://s3",
    }
    s3, http, _ = Access().given_to(_FILES, environment)
    assert s3.source["endpoint"] == "https://s3" and "endpoint" not in http.source
    s3, *_ = Access(endpoint="https://given").given_to(_FILES, environment)
    assert s3.source["endpoint"] == "https://given"
    s3, *_ = Access().given_to(_FILES, {"AWS_ENDPOINT_URL": "https://all"})
    assert s3.source["endpoint"] == "https://all"


def test_an_option_without_a_file_that_needs_it() -> None:
    with pytest.raises(UsageError, match="--basic-auth-file is about files from http"):
        Access(basic_auth_file=Path("/etc/basic")).given_to(_FILES[:1], {})
    with pytest.raises(UsageError, match="no such file is added") as refused:
        Access(ca_file=Path("/etc/ca.pem")).given_to(_FILES[2:], {})
    assert "--add-file, or --url-file, that needs it" in str(refused.value)
    with pytest.raises(UsageError) as refused:
        Access(endpoint="https://s3").given_to(_FILES[1:], {})
    assert "--url-file" not in str(refused.value)  # a URL in a file is one of http


def test_a_relative_path_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/etc")
    (made,) = Access(ca_file=Path("ca.pem")).given_to(_FILES[1:2], {})
    assert made.source["ca_file"] == "/etc/ca.pem"


def test_a_url_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/etc")
    made = VolumeFile.parse_url_file("a/b=signed")
    assert made.to_keys()["source"] == {"kind": "http", "url_file": "/etc/signed"}
    for text in ("signed", "=signed", "a="):
        with pytest.raises(UsageError, match="is not PATH=FILE"):
            VolumeFile.parse_url_file(text)
