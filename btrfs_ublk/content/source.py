"""Descriptions of where bytes come from."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

#: A description as JSON and definitions have it, whose values a server checks.
SourceKeys = dict[str, Any]


class Mirror(TypedDict, total=False):
    """A place that has a source's bytes, of one ``kind``: a file's "path", an http
    "url", "bucket" and "key" of s3, or "registry", "repository" and "tag" or "digest"
    of oci. Other keys are optional (docs/materialisation.md). Paths are absolute, and
    names ending in _file are paths."""

    kind: Literal["file", "http", "s3", "oci", "memset", "pattern"]
    path: str
    url: str
    url_file: str
    registry: str
    repository: str
    tag: str
    digest: str
    docker_config: str
    namespace: str
    anonymous: bool
    bucket: str
    key: str
    version_id: str
    endpoint: str
    region: str
    path_style: bool
    credentials_file: str
    profile: str
    insecure: bool
    ca_file: str
    client_cert: str
    client_key: str
    proxy: str
    headers_file: str
    bearer_token_file: str
    basic_auth_file: str
    via: list[str]
    via_plain: bool
    byte: int
    base: int


class Source(Mirror, total=False):
    """An object: one Mirror's keys, or a list of "mirrors", and what is known of it:
    its "size" and the "unit" of its digests in bytes, its "digests" (hexadecimal
    SHA-256, or the path of a file of them), and their "root"; the "identity" of the
    object that the first mirror has to have ("etag …")."""

    mirrors: list[Mirror]
    size: int
    unit: int
    digests: list[str] | dict[Literal["path"], str]
    root: str
    identity: str
    codec: Literal["gzip", "zstd"]
    index: dict[Literal["path"], str]
    selection: dict[Literal["path"], str]
