"""The options of ``btrfs-ublk map add`` that say where a source is; not a command.

Secrets are never among them: they are in files that the server reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from btrfs_ublk.base.entry import PathType, stacked
from btrfs_ublk.base.hosts import check_cache
from btrfs_ublk.content import SourceKeys
from btrfs_ublk.content.oci import parse_image
from btrfs_ublk.errors import UsageError

#: Options for all mirrors of a kind, which set keys of these mirrors.
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
#: Kinds that may have caches in front of them.
_CACHED = ("http", "s3", "oci")


def _mirror(
    name: str, make: Callable[[Any], SourceKeys], help: str, **more: Any
) -> Callable[[Any], Any]:
    """Make an option that adds a mirror; mirrors keep the order of the command line."""

    def add(ctx: click.Context, _param: click.Parameter, given: Any) -> None:
        mirrors = ctx.ensure_object(list)
        mirrors += [make(value) for value in given]

    return click.option(
        name, callback=add, expose_value=False, multiple=True, help=help, **more
    )


def parse_json(text: str, where: str) -> Any:
    """Parse JSON; ``where`` names it in errors. Raises UsageError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error


def _any(text: str) -> SourceKeys:
    mirror = parse_json(text, "--mirror")
    if not isinstance(mirror, dict):
        raise UsageError(f"--mirror {text}: not a JSON object")
    return mirror


def _s3(text: str) -> SourceKeys:
    bucket, _, key = text.removeprefix("s3://").partition("/")
    if not bucket or not key:
        raise UsageError(f"--s3 {text}: not BUCKET/KEY")
    return {"kind": "s3", "bucket": bucket, "key": key}


def _oci(text: str) -> SourceKeys:
    mirror = parse_image(text.removeprefix("oci://"))
    if mirror is None:
        raise UsageError(
            f"--oci {text}: neither REGISTRY/REPOSITORY:TAG nor @DIGEST",
            hint="as in registry.example.org/debian:stable, or @sha256:… of a blob",
        )
    return mirror


#: All these options; ``mirrors_of`` reads them.
mirror_options = stacked(
    _mirror(
        "--file",
        lambda path: {"kind": "file", "path": _plain(path)},
        "A file that the server reads. May be repeated, as those below: then each"
        " is a mirror of the same content, and they are asked in that order.",
        type=PathType(),
        metavar="PATH",
    ),
    _mirror(
        "--url",
        lambda url: {"kind": "http", "url": url},
        "An object of an HTTP(S) server that answers requests for ranges.",
    ),
    _mirror(
        "--url-file",
        lambda path: {"kind": "http", "url_file": _plain(path)},
        "The same, but the URL is in a file, mode 600, that the server reads: a"
        " signed one is a secret.",
        type=PathType(),
        metavar="PATH",
    ),
    _mirror(
        "--s3",
        _s3,
        "An object of an S3 store; the options from --endpoint on are about it.",
        metavar="BUCKET/KEY",
    ),
    _mirror(
        "--oci",
        _oci,
        "A blob of a container registry, REGISTRY/REPOSITORY@DIGEST, or :TAG: the"
        " one layer of an image, whose digest is kept. See --docker-config.",
        metavar="IMAGE",
    ),
    _mirror(
        "--mirror",
        _any,
        'Any kind, with any keys: {"kind": …}; computed ones are "memset" (with "byte")'
        ' and "pattern" (each 8 bytes hold their offset).',
        metavar="JSON",
    ),
    click.option("--endpoint", metavar="URL", help="URL of the S3 store.  [Amazon's]"),
    click.option(
        "--region", metavar="NAME", help="Region of the S3 store.  [us-east-1]"
    ),
    click.option(
        "--path-style/--virtual-host-style",
        default=None,
        help="ENDPOINT/BUCKET/KEY, or BUCKET.HOST/KEY.  [the first, with --endpoint]",
    ),
    click.option(
        "--credentials-file",
        type=PathType(),
        help="Keys, as in ~/.aws/credentials, mode 600; the server reads it.",
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
        type=PathType(),
        help="A config.json with the registry's login, closed to all others.",
    ),
    click.option(
        "--insecure",
        is_flag=True,
        default=None,
        help="Ask the registry by http; on loopback only.",
    ),
    click.option(
        "--via",
        multiple=True,
        metavar="URL",
        help="A cache in front of --url, --s3 and --oci, http://HOST:PORT. May be"
        " repeated.  [those of hosts.toml]",
    ),
    click.option(
        "--via-plain",
        is_flag=True,
        help="Credentials may go to those caches without TLS.",
    ),
)


def mirrors_of(ctx: click.Context) -> list[SourceKeys]:
    """Return mirrors in the order of the command line, with options of their kinds."""
    mirrors: list[SourceKeys] = ctx.ensure_object(list)
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
    if ctx.params.get("via"):
        _add_caches(mirrors, ctx.params)
    for mirror in mirrors:
        for kind, key in (("file", "path"), ("http", "url_file")):
            path = mirror.get(key)
            # NB: an empty path is not the current directory; the server refuses it.
            if mirror.get("kind") == kind and isinstance(path, str) and path:
                mirror[key] = str(Path(path).absolute())
    return mirrors


def _add_caches(mirrors: list[SourceKeys], given: dict[str, Any]) -> None:
    ours = [mirror for mirror in mirrors if mirror.get("kind") in _CACHED]
    if not ours:
        raise UsageError("--via is about --url, --s3 and --oci, and there is none")
    for mirror in ours:
        mirror["via"] = [check_cache(url, "--via") for url in given["via"]]
        if given.get("via_plain"):
            mirror["via_plain"] = True


def _plain(value: object) -> object:
    """Make paths absolute, as the server has another working directory."""
    return str(value.absolute()) if isinstance(value, Path) else value
