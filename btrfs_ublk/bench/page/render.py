"""The page as text, and files that are there as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

import btrfs_ublk
from btrfs_ublk.bench import page as package
from btrfs_ublk.bench.page.build import Page
from btrfs_ublk.bench.page.palette import ROLES, Shade
from btrfs_ublk.bench.page.svg import role_rules
from btrfs_ublk.errors import BtrfsUblkError

TITLE = "btrfs-ublk: benchmarks"
#: Behind what stands out.
PANEL = Shade("#f3f5f7", "#1d232a")
#: What is said of an emulated machine.
EMULATED = Shade("#7b1fa2", "#d59cf0")


def render(page: Page, *, command: str) -> str:
    """HTML. All that comes from files is escaped, and a policy in the page forbids it
    to run or fetch anything; what is not escaped are the drawings, which are XML.
    """
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    source = files(package)
    template = environment.from_string((source / "page.html").read_text("utf-8"))
    return template.render(
        title=TITLE,
        page=page,
        command=command,
        version=btrfs_ublk.__version__,
        style=Markup(_style((source / "page.css").read_text("utf-8"))),
    )


def _style(rules: str) -> str:
    """A style sheet with the palette's variables before ``rules``."""
    colors = {**ROLES, "panel": PANEL, "emulated": EMULATED}
    light = "".join(f"--{name}:{shade.light};" for name, shade in colors.items())
    dark = "".join(f"--{name}:{shade.dark};" for name, shade in colors.items())
    return "\n".join(
        [
            f":root{{color-scheme:light dark;{light}}}",
            f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}",
            *role_rules(),
            rules,
        ]
    )


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or leave what was there: never a half of it.

    Raises BtrfsUblkError.
    """
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        raise BtrfsUblkError(f"{path} cannot be written: {error.strerror}") from error


def _umask() -> int:
    """Of this process; it can only be read by being set."""
    value = os.umask(0o077)
    os.umask(value)
    return value
