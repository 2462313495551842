"""The surface for other programs, and the examples of its document."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from conftest import Need
from web_server import NGINX, web_server

import btrfs_ublk
from btrfs_ublk import api
from btrfs_ublk.capabilities import FUSE
from btrfs_ublk.ledger import Ledger
from btrfs_ublk.volumes.store import VOLUMES_VARIABLE

_PROJECT = Path(__file__).parent.parent
_DOCUMENT = _PROJECT / "docs" / "how-to" / "python-api.md"
_EXAMPLES = re.findall(
    r"^## (.*?)$|^```python\n(.*?)^```$", _DOCUMENT.read_text(), re.M | re.S
)
EXAMPLES: list[tuple[str, str]] = []
for heading, source in _EXAMPLES:
    if heading:
        title = heading
    else:
        EXAMPLES.append((title, source))

for source in re.findall(
    r"^```python\n(.*?)^```$", (_PROJECT / "README.md").read_text(), re.M | re.S
):
    EXAMPLES.append(("README", source))

#: What examples fetch.
_URL = re.compile(r"http://[a-z0-9.]+:8000/([a-z.]+)")

_USER = """
import btrfs_ublk

def size(text: str) -> int:
    return btrfs_ublk.parse_size(text)

with btrfs_ublk.kept_volume("x") as volume:
    reveal_type(volume)
btrfs_ublk.kept_volume(3)
btrfs_ublk.there_is_no_such_name
"""


def test_it_is_imported_when_it_is_wanted() -> None:
    """The command does not pay for it."""
    program = (
        "import btrfs_ublk, sys; from btrfs_ublk import units; "
        "assert 'btrfs_ublk.api' not in sys.modules; "
        "from btrfs_ublk import *; kept_volume, BlockServer, UsageError"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_all_is_documented_and_no_module_is_in_its_way() -> None:
    assert btrfs_ublk.__all__ == api.__all__ == sorted(api.__all__)
    assert set(api.__all__) <= set(dir(btrfs_ublk))
    modules = {module.name for module in pkgutil.iter_modules(btrfs_ublk.__path__)}
    assert not modules & set(api.__all__)
    for name in api.__all__:
        thing = getattr(btrfs_ublk, name)
        assert thing is getattr(importlib.import_module("btrfs_ublk.api"), name)
        assert thing.__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="nonsense"):
        btrfs_ublk.nonsense  # type: ignore[attr-defined]


def test_what_it_takes_and_returns_can_be_named() -> None:
    offered = [getattr(api, name) for name in api.__all__]
    functions = [*filter(inspect.isfunction, offered), *vars(api.MapClient).values()]
    # Who has a ledger of his own is no other program.
    known = {id(thing) for thing in (*offered, Ledger)}
    missing = {
        kind.__qualname__
        for function in functions
        if inspect.isfunction(function) and not function.__name__.startswith("_")
        for hint in get_type_hints(function).values()
        for kind in classes_in(hint)
        if kind.__module__.startswith("btrfs_ublk.") and id(kind) not in known
    }
    assert missing == set()


def classes_in(hint: Any) -> list[type]:
    """Those that a type is made of."""
    inner = [kind for part in get_args(hint) for kind in classes_in(part)]
    return [hint, *inner] if inspect.isclass(hint) else inner


def test_users_are_checked_by_mypy_strict(tmp_path: Path) -> None:
    assert (Path(btrfs_ublk.__file__).parent / "py.typed").exists()
    sources = [*(source for _, source in EXAMPLES), _USER]
    for number, source in enumerate(sources):
        (tmp_path / f"program_{number}.py").write_text(source)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file=",
            *tmp_path.iterdir(),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=_PROJECT,
        env=os.environ | {"MYPYPATH": str(_PROJECT)},
    )
    lines = done.stdout.splitlines()
    errors = [line for line in lines if "error:" in line]
    user = f"program_{len(sources) - 1}.py"
    assert all(user in line for line in errors), done.stdout
    assert [line.split(":")[1] for line in errors] == ["9", "10"], done.stdout
    assert any("report.KeptVolume" in line for line in lines)


@pytest.mark.native
@pytest.mark.parametrize(
    "number", range(len(EXAMPLES)), ids=lambda number: EXAMPLES[number][0]
)
def test_example(need: Need, sparse_path: Path, number: int) -> None:
    need(FUSE)
    source = EXAMPLES[number][1]
    with ExitStack() as stack:
        wanted = _URL.search(source)
        if wanted:
            need(NGINX)
            server = stack.enter_context(web_server(sparse_path / "web"))
            (server.files / wanted[1]).write_bytes(os.urandom(1 << 20))
            source = source.replace(wanted[0], server.url(f"files/{wanted[1]}"))
        # A mount point that is there on any machine, and files that stay.
        (sparse_path / "mnt").mkdir()
        source = source.replace('"/mnt"', '"mnt"').replace('"/tmp/', '"')
        subprocess.run(
            [sys.executable, "-c", source],
            check=True,
            timeout=240,
            cwd=sparse_path,
            env=os.environ | {VOLUMES_VARIABLE: str(sparse_path / "volumes")},
        )
