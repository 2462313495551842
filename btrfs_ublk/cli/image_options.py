"""The options of commands that ask a registry; not a command."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from btrfs_ublk import image as images
from btrfs_ublk.base.entry import PathType

_Function = TypeVar("_Function", bound=Callable[..., Any])


def registry_options(function: _Function) -> _Function:
    """Add the options that say how a registry is asked."""
    for option in reversed(
        [
            click.option(
                "--docker-config",
                type=PathType(),
                help="A config.json with the registry's login, closed to all others."
                "  [Docker's own]",
            ),
            click.option(
                "--ca-file",
                type=PathType(),
                help="Certificates (PEM) to trust for the registry.  [the system's]",
            ),
            click.option(
                "--insecure",
                is_flag=True,
                help="Ask the registry by http; on loopback only.",
            ),
        ]
    ):
        function = option(function)
    return function


def via_options(function: _Function) -> _Function:
    """Add the options that name caches in front of a registry."""
    for option in (
        click.option(
            "--via-plain",
            is_flag=True,
            help="Tokens may go to those caches without TLS.",
        ),
        click.option(
            "--via",
            multiple=True,
            metavar="URL",
            help="A cache in front of the registry, http://HOST:PORT; may be repeated."
            "  [those of hosts.toml]",
        ),
    ):
        function = option(function)
    return function


def with_access(function: _Function) -> _Function:
    """Add the options of a registry; the command gets them as ``access``."""

    @wraps(function)
    def command(
        *args: Any,
        docker_config: Path | None,
        ca_file: Path | None,
        insecure: bool,
        **keys: Any,
    ) -> Any:
        access = images.RegistryAccess(docker_config, ca_file, insecure)
        return function(*args, access=access, **keys)

    return cast(_Function, registry_options(command))
