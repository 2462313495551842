"""The options of ``btrfs-ublk map add`` that say where a source is. Not a command.

Secrets are never among them: they are in files that the server reads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from btrfs_ublk.errors import UsageError
from btrfs_ublk.lazy import Source
from btrfs_ublk.lazy.bulk import parse_json

#: By kind, options that are about all of its mirrors, and are its keys.
_KEYS = {
    "s3": (
        "endpoint",
        "region",
        "path_style",
        "credentials_file",
        "profile",
        "anonymous",
    ),
    "oci": ("docker_config", "insecure"),
}


def _mirror(kind: str, key: str) -> Any:
    """An option that adds a mirror; they are in the order of the command line."""

    def add(
        ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
    ) -> None:
        mirrors = ctx.ensure_object(list)
        mirrors += [{"kind": kind, key: value} for value in values]

    return add


def _any_mirror(
    ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> None:
    for value in values:
        mirror = parse_json(value, "--mirror")
        if not isinstance(mirror, dict):
            raise UsageError(f"--mirror {value}: not a JSON object")
        ctx.ensure_object(list).append(mirror)


def _memset(ctx: click.Context, _param: click.Parameter, value: int | None) -> None:
    if value is not None:
        ctx.ensure_object(list).append({"kind": "memset", "byte": value})


def _pattern(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(list).append({"kind": "pattern"})


def _s3(ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> None:
    for value in values:
        bucket, _, key = value.removeprefix("s3://").partition("/")
        if not bucket or not key:
            raise UsageError(f"--s3 {value}: not BUCKET/KEY")
        ctx.ensure_object(list).append({"kind": "s3", "bucket": bucket, "key": key})


def _oci(ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> None:
    for value in values:
        image, _, digest = value.partition("@")
        registry, _, repository = image.partition("/")
        if not registry or not repository or not digest:
            raise UsageError(
                f"--oci {value}: not REGISTRY/REPOSITORY@DIGEST",
                hint="as in registry.example.org/debian@sha256:…, with a blob's digest",
            )
        ctx.ensure_object(list).append(
            {
                "kind": "oci",
                "registry": registry,
                "repository": repository,
                "digest": digest,
            }
        )


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--file",
        "files",
        multiple=True,
        metavar="PATH",
        callback=_mirror("file", "path"),
        expose_value=False,
        help="A file that the server reads. May be repeated, as those below: then each"
        " is a mirror of the same content, and they are asked in that order.",
    ),
    click.option(
        "--url",
        multiple=True,
        callback=_mirror("http", "url"),
        expose_value=False,
        help="An object of an HTTP(S) server that answers requests for ranges.",
    ),
    click.option(
        "--s3",
        multiple=True,
        metavar="BUCKET/KEY",
        callback=_s3,
        expose_value=False,
        help="An object of an S3 store; the options from --endpoint on are about it.",
    ),
    click.option(
        "--oci",
        multiple=True,
        metavar="REGISTRY/REPOSITORY@DIGEST",
        callback=_oci,
        expose_value=False,
        help="A blob of a container registry; see --docker-config.",
    ),
    click.option(
        "--mirror",
        multiple=True,
        metavar="JSON",
        callback=_any_mirror,
        expose_value=False,
        help='Any kind, with any keys: {"kind": …}.',
    ),
    click.option(
        "--memset",
        type=click.IntRange(0, 255),
        metavar="BYTE",
        callback=_memset,
        expose_value=False,
        help="One byte repeated.",
    ),
    click.option(
        "--pattern",
        is_flag=True,
        callback=_pattern,
        expose_value=False,
        help="Each aligned 8 bytes hold their offset.",
    ),
    click.option("--endpoint", metavar="URL", help="Of the S3 store.  [Amazon's]"),
    click.option("--region", metavar="NAME", help="Of the S3 store.  [us-east-1]"),
    click.option(
        "--path-style/--virtual-host-style",
        default=None,
        help="ENDPOINT/BUCKET/KEY, or BUCKET.HOST/KEY.  [the first, with --endpoint]",
    ),
    click.option(
        "--credentials-file",
        type=click.Path(path_type=Path),
        help="Like ~/.aws/credentials, closed to all others; the server reads it.",
    ),
    click.option("--profile", metavar="NAME", help="The section of that file."),
    click.option(
        "--anonymous",
        is_flag=True,
        default=None,
        help="Ask the S3 store without a signature.",
    ),
    click.option(
        "--docker-config",
        type=click.Path(path_type=Path),
        help="A config.json with the registry's login, closed to all others.",
    ),
    click.option(
        "--insecure",
        is_flag=True,
        default=None,
        help="Ask the registry by http; on loopback only.",
    ),
)


def mirror_options(function: Any) -> Any:
    """All of them, in the order of the help. ``mirrors_of`` takes what they say."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def mirrors_of(ctx: click.Context) -> list[Source]:
    """In the order of the command line, with what all of a kind share."""
    mirrors: list[Source] = ctx.ensure_object(list)
    for kind, keys in _KEYS.items():
        given = {key: ctx.params.get(key) for key in keys}
        shared = {
            key: _plain(value) for key, value in given.items() if value is not None
        }
        ours = [mirror for mirror in mirrors if mirror.get("kind") == kind]
        if shared and not ours:
            option = next(iter(shared)).replace("_", "-")
            raise UsageError(f"--{option} is about --{kind}, and there is none")
        for mirror in ours:
            mirror.update(shared)
    for mirror in mirrors:
        if mirror.get("kind") == "file" and isinstance(mirror.get("path"), str):
            mirror["path"] = str(Path(mirror["path"]).absolute())
    return mirrors


def _plain(value: object) -> object:
    """The server knows nothing of our directory."""
    return str(value.absolute()) if isinstance(value, Path) else value
