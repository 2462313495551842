"""A signed URL's query is told to its server, and to nobody else."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices import kill_server
from support.needs import Need
from support.volumes import NAME, Place
from support.web_servers import NGINX, web_server

from btrfs_ublk.base.capabilities import FUSE
from btrfs_ublk.device import show_device

pytestmark = pytest.mark.usefixtures("in_process")

SECRET = "sentinel-5f1d02"
QUERY = f"?Expires=2&Signature={SECRET}"


@pytest.fixture
def place(need: Need, sparse_path: Path) -> Iterator[Place]:
    need(NGINX, FUSE)
    found = Place(sparse_path, "fuse")
    yield found
    found.take_all_down()


def test_nothing_tells_it(place: Place) -> None:
    definition = place.root / "definition.toml"
    with web_server(place.root / "web") as server:
        (server.files / "one").write_bytes(bytes(5000))
        url = server.url("files/one") + QUERY
        other = server.url("files/two") + QUERY
        definition.write_text(f"""
            size = "1G"
            writable = "256M"
            mount = "{place.target}"
            front_end = "fuse"
            deadline = 2
            [[file]]
            path = "one"
            url = "{url}"
            """)
        heard = [place.told("volume", "up", NAME, "--file", definition)]
        assert place.state() == "up", heard
        trace = place.root / "trace"
        heard.append(place.told("trace", "record", NAME, "--for=1", "-o", trace))
        heard.append(trace.read_text())
        assert (place.target / "one").read_bytes() == bytes(5000)
        heard += [
            place.told(*words)
            for words in (
                # Refused, as the first has another source, and the second is none.
                ("volume", "up", NAME, f"--add-file=one={other}"),
                ("volume", "up", NAME, f"--add-file=three=ftp://h/{QUERY}"),
                ("volume", "up", NAME, f"--add-file={url}"),
                # Added; it answers with 404.
                ("volume", "up", NAME, f"--add-file=two={other}"),
                ("map", "add", NAME, "--url", url),
                ("map", "add", NAME, "--url", other),
            )
        ]
    # Nobody answers now.
    (place.target / "one").write_bytes(b"")
    heard += [
        place.told(*words)
        for words in (
            ("volume", "status", NAME),
            ("volume", "status", NAME, "--json"),
            ("volume", "list", "--json"),
            ("device", "status", NAME),
            ("device", "status", NAME, "--json"),
            ("device", "list", "--json"),
            ("map", "list", NAME),
            ("map", "show", NAME, "0"),
            ("map", "show", NAME, "0", "--json"),
            ("map", "stats", NAME, "--json"),
            ("map", "verify", NAME, "--ask"),
            ("metrics",),
        )
    ]
    kill_server(NAME)
    heard.append(place.told("device", "status", NAME))
    device = show_device(NAME)
    assert device.state.server is not None and device.state.supervisor is not None
    for pid in (device.state.server.pid, device.state.supervisor.pid):
        for name in ("cmdline", "environ"):
            heard.append(Path(f"/proc/{pid}/{name}").read_text(errors="replace"))
    heard.append(device.log.read_text())
    for text in heard:
        assert SECRET not in text
    assert "files/one?[redacted]" in "".join(heard)
    kept = [path for path in place.base.rglob("*") if path.is_file()]
    holding = [
        path
        for path in kept
        if path.stat().st_size < 1 << 20 and SECRET.encode() in path.read_bytes()
    ]
    assert {"definition.toml", "files.json"} <= {path.name for path in holding}
    for path in holding:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_file_has_it(place: Place) -> None:
    """Then nothing else does."""
    definition, signed = place.root / "definition.toml", place.root / "signed"
    definition.write_text(f"""
        size = "1G"
        mount = "{place.target}"
        front_end = "fuse"
        [[file]]
        path = "one"
        source = {{ kind = "http", url_file = "{signed}" }}
        """)
    with web_server(place.root / "web") as server:
        (server.files / "one").write_bytes(bytes(5000))
        signed.touch(mode=0o600)
        signed.write_text(server.url("files/one") + QUERY)
        heard = place.told("volume", "up", NAME, "--file", definition)
        assert place.state() == "up", heard
        assert (place.target / "one").read_bytes() == bytes(5000)
        more = f"--url-file=two={signed}"
        heard += place.told("volume", "up", NAME, more)
        assert (place.target / "two").read_bytes() == bytes(5000)
        heard += place.told("map", "add", NAME, "--url-file", signed)
        assert "already mapped" in heard
        for words in (["volume", "status", NAME], ["map", "show", NAME, "0"]):
            shown = place.told(*words)
            assert str(signed) in shown
            heard += shown
    assert SECRET not in heard + show_device(NAME).log.read_text()
    for path in place.base.rglob("*"):
        if path.is_file() and path.stat().st_size < 1 << 20:
            assert SECRET.encode() not in path.read_bytes(), path
