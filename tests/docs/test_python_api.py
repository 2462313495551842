"""The surface for other programs, and the examples of its document."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.needs import Need
from support.paths import PROJECT
from support.web_servers import NGINX, web_server

import btrfs_ublk
from btrfs_ublk.base.capabilities import FUSE
from btrfs_ublk.volume.store import VOLUMES_VARIABLE

_DOCUMENT = PROJECT / "docs" / "how-to" / "python-api.md"
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
    r"^```python\n(.*?)^```$", (PROJECT / "README.md").read_text(), re.M | re.S
):
    EXAMPLES.append(("README", source))

#: Of what examples fetch: no whole blocks.
SIZE_BYTES = (1 << 20) + 5
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
        cwd=tmp_path,
    )
    lines = done.stdout.splitlines()
    errors = [line for line in lines if "error:" in line]
    user = f"program_{len(sources) - 1}.py"
    assert all(user in line for line in errors), done.stdout
    assert [line.split(":")[1] for line in errors] == ["9", "10"], done.stdout
    assert any("report.KeptVolume" in line for line in lines)


@pytest.mark.device
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
            (server.files / wanted[1]).write_bytes(os.urandom(SIZE_BYTES))
            source = source.replace(wanted[0], server.url(f"files/{wanted[1]}"))
        (sparse_path / "mnt").mkdir()
        done = subprocess.run(
            [sys.executable, "-c", source],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=240,
            cwd=sparse_path,
            env=os.environ
            | {VOLUMES_VARIABLE: str(sparse_path / "volumes")}
            | {"TMPDIR": str(sparse_path)},
        )
        if "print(len(" in source:
            assert str(SIZE_BYTES) in done.stdout.split()
