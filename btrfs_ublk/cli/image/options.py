"""The options of commands that ask a registry, or make images; not a command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from btrfs_ublk import image as images
from btrfs_ublk import volume as volumes
from btrfs_ublk.base.entry import CountType, PathType, SizeType, stacked
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.errors import UsageError

if TYPE_CHECKING:
    from btrfs_ublk.image.reference import Name

_Function = TypeVar("_Function", bound=Callable[..., Any])


#: The options that say how a registry is asked.
registry_options = stacked(
    click.option(
        "--docker-config",
        type=PathType(exists=True, dir_okay=False),
        help="A config.json with the registry's login, closed to all others."
        "  [those of Docker and podman]",
    ),
    click.option(
        "--ca-file",
        type=PathType(exists=True, dir_okay=False),
        help="Certificates (PEM) to trust for the registry.  [the system's]",
    ),
    click.option(
        "--insecure", is_flag=True, help="Ask the registry by http; on loopback only."
    ),
)
#: The options that name caches in front of a registry.
via_options = stacked(
    click.option(
        "--via",
        multiple=True,
        metavar="URL",
        help="A cache in front of the registry, http://HOST:PORT; may be repeated."
        "  [those of hosts.toml]",
    ),
    click.option(
        "--via-plain", is_flag=True, help="Tokens may go to those caches without TLS."
    ),
)
#: Those of commands that make an image in a layout.
layout_options = stacked(
    click.option(
        *("-o", "--output"),
        required=True,
        type=PathType(),
        help="The OCI image layout, a directory; it is made if missing.",
    ),
    click.option("--tag", help="Its name in the layout.  [the source's, else latest]"),
)
#: Where commands put an image that they read whole.
directory_option = click.option(
    "--directory",
    type=PathType(),
    help="Where temporary files go, each as large as the image.  [TMPDIR, else /tmp]",
)


def with_access(function: _Function) -> _Function:
    """Add the options of a registry; the command gets them as ``access``, with the
    caches of ``via_options``, if it has these too.
    """

    @wraps(function)
    def command(
        *args: Any,
        docker_config: Path | None,
        ca_file: Path | None,
        insecure: bool,
        via: tuple[str, ...] = (),
        via_plain: bool = False,
        **keys: Any,
    ) -> Any:
        access = images.RegistryAccess(
            docker_config, ca_file, insecure, via=via or None, via_plain=via_plain
        )
        return function(*args, access=access, **keys)

    return cast(_Function, registry_options(command))


def tell(
    shown: object | None, as_json: bool, keys: dict[str, Any], note: str | None = None
) -> None:
    """Print what a command has made: all of it as JSON, or ``shown``, and the ``note``
    on stderr."""
    if as_json:
        click.echo(json.dumps(keys))
        return
    if shown is not None:
        click.echo(shown)
    if note is not None:
        click.echo(note, err=True)


#: Compare the layers of what is made with those of its source.
check_option = click.option(
    "--check",
    is_flag=True,
    help="Read all layers back, and compare them with those of the source.",
)
mount_from_option = click.option(
    "--mount-from",
    metavar="REPOSITORY",
    help="A repository of the same registry that may have the blobs already.",
)
platform_option = click.option(
    "--platform",
    metavar="OS/ARCHITECTURE",
    help="Which image of an index.  [this machine's]",
)


max_inline_option = click.option(
    "--max-inline", type=SizeType(), help="Smaller files are in the metadata.  [2K]"
)


def _unit(text: str, *, what: str) -> int:
    # NB: commands on volumes have these options too, and need not import it.
    from btrfs_ublk.content.digests import parse_unit

    return parse_unit(text, what=what)


unit_option = click.option(
    "--unit",
    type=SizeType(_unit),
    default="256K",
    help="What is verified, and fetched, at once: a power of two from 4K to 1M.",
)


def with_build_options(function: _Function) -> _Function:
    """Add the options that say how an image is made; the command gets them as
    ``options``, and ``first`` for with_first()."""

    @wraps(function)
    def command(
        *args: Any,
        compression: str | None,
        checksum: str | None,
        max_inline: int | None,
        unit: int,
        threads: int | None,
        trace: Path | None,
        traced: str | None,
        trace_run: str | None,
        **keys: Any,
    ) -> Any:
        if traced is not None and trace is None:
            raise UsageError(
                "--traced says of what a trace is", hint="name it: --trace"
            )
        if trace is not None and trace_run is not None:
            raise UsageError(
                "--trace and --trace-run both say what comes first", hint="give one"
            )
        options = images.BuildOptions(
            compression=compression,
            checksum=checksum,
            max_inline=max_inline,
            threads=threads,
            unit_bytes=unit,
        )
        first = First(trace, traced, trace_run)
        return function(*args, options=options, first=first, **keys)

    return cast(_Function, _build_options()(command))


def _build_options() -> Callable[[Any], Any]:
    # NB: only what makes images imports what these name.
    return stacked(
        click.option(
            "--compression",
            metavar="NAME:LEVEL",
            help="Of the data, which the kernel decompresses: none, or zstd:1 to"
            " zstd:19.  [zstd:9]",
        ),
        click.option(
            "--checksum",
            type=click.Choice(images.CHECKSUMS),
            help="What the kernel verifies blocks by.  [crc32c]",
        ),
        max_inline_option,
        unit_option,
        click.option(
            "--threads",
            type=CountType(1, 256),
            help="Threads that compress.  [as many as CPUs]",
        ),
        click.option(
            "--trace",
            type=PathType(exists=True, dir_okay=False),
            help="Put first what this trace of another build has read"
            " (`trace record`); `image up` fetches it at once.",
        ),
        click.option(
            "--traced",
            metavar="IMAGE",
            help="The image that the trace is of."
            "  [found in the output, or on this machine]",
        ),
        click.option(
            "--trace-run",
            metavar="CMD",
            help="Or make the image twice: this command runs in a fork of the first"
            " one (as root, with this machine's network), and what it reads comes"
            " first.",
        ),
    )


@dataclass(frozen=True)
class First:
    """What comes first in an image: what the trace of another build (``traced``) has
    read, or what a command reads that is run in it."""

    trace: Path | None
    traced: str | None
    command: str | None

    def __bool__(self) -> bool:
        return self.trace is not None or self.command is not None


def with_first(
    options: images.BuildOptions,
    first: First,
    origin: Name | Path,
    access: images.RegistryAccess,
    *,
    layout: Path | None = None,
    platform: str | None = None,
) -> images.BuildOptions:
    """Return options by which ``first`` comes first in the image of ``origin``; see
    traced_ranges()."""
    from btrfs_ublk.content.trace import Trace

    if first.trace is not None:
        name = images.parse_name(first.traced) if first.traced is not None else None
        if isinstance(name, images.Reference):
            access = access.of(name.registry)
        found = images.traced_ranges(Trace.load(first.trace), layout, name, access)
        return replace(options, first=found)
    if first.command is None:
        return options
    from btrfs_ublk.kernel.temporary import tempdir

    words = shlex.split(first.command)
    with tempdir() as work:
        made = images.build_image(
            *(origin, work / "layout", replace(options, first=())),
            platform=platform,
            access=access,
        )
        trace = volumes.trace_run(str(made.name), words, work)
        found = images.traced_ranges(trace, work / "layout", None, access)
    return replace(options, first=found)
