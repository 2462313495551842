"""The options of ``btrfs-ublk map add`` that say where a source is; not a command.

Secrets are never among them: they are in files that the server reads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from btrfs_ublk.base.entry import CountType, PathType
from btrfs_ublk.base.hosts import check_cache
from btrfs_ublk.content import SourceKeys
from btrfs_ublk.content.bulk import parse_json
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


def _mirror(kind: str, key: str) -> Any:
    """Make an option that adds a mirror; mirrors keep the order of the command line."""

    def add(
        ctx: click.Context, _param: click.Parameter, values: tuple[str | Path, ...]
    ) -> None:
        mirrors = ctx.ensure_object(list)
        mirrors += [{"kind": kind, key: _plain(value)} for value in values]

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
        mirror = parse_image(value.removeprefix("oci://"))
        if mirror is None:
            raise UsageError(
                f"--oci {value}: neither REGISTRY/REPOSITORY:TAG nor @DIGEST",
                hint="as in registry.example.org/debian:stable, or @sha256:… of a blob",
            )
        ctx.ensure_object(list).append(mirror)


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--file",
        "files",
        type=PathType(),
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
        "--url-file",
        type=PathType(),
        multiple=True,
        metavar="PATH",
        callback=_mirror("http", "url_file"),
        expose_value=False,
        help="The same, but the URL is in a file, mode 600, that the server reads: a"
        " signed one is a secret.",
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
        metavar="IMAGE",
        callback=_oci,
        expose_value=False,
        help="A blob of a container registry, REGISTRY/REPOSITORY@DIGEST, or :TAG: the"
        " one layer of an image, whose digest is kept. See --docker-config.",
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
        type=CountType(0, 255),
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


def mirror_options(function: Any) -> Any:
    """Add all these options, in the order of the help; ``mirrors_of`` reads them."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


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
