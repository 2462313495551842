"""``btrfs-ublk image warm``: after it, hosts of a site cost the registry nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.images import UNIT, sealed_image
from support.needs import Need
from support.shells import fetch_shell
from support.sites import Ring, ring
from support.web_servers import NGINX, response, scripted_server

from btrfs_ublk.cli.image import command
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuiltImage
from btrfs_ublk.image.documents import SealedManifest
from btrfs_ublk.image.places import open_repository
from btrfs_ublk.image.pull import look_up, open_sealed
from btrfs_ublk.image.reference import Reference, parse_reference
from btrfs_ublk.image.warm import warm_image
from btrfs_ublk.testing.registry import REGISTRY, loopback_registry

#: 5 MiB: hosts choose a cache for each 4 MiB.
UNITS = 80
HOSTS = 2


@dataclass
class Origin:
    host: str
    log: Path
    name: Reference
    made: BuiltImage
    manifest: SealedManifest
    data: bytes

    def asked_for_blobs(self) -> list[str]:
        """Return the requests for blobs that it has answered so far."""
        lines = [
            json.loads(x) for x in self.log.read_text().splitlines() if x[:1] == "{"
        ]
        return [
            f"{x['http.request.method']} {x['http.request.uri']}"
            for x in lines
            if x.get("msg") == "response completed"
            and "/blobs/" in x["http.request.uri"]
        ]


@pytest.fixture(scope="module")
def origin(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Origin]:
    need: Need = request.getfixturevalue("need")
    need(REGISTRY)
    need(NGINX)
    home = tmp_path_factory.mktemp("registry")
    made = sealed_image(home / "image", units=UNITS)
    layout, manifest, _ = open_sealed(made.name)
    assert manifest.data is not None
    with loopback_registry(home) as host:
        name = f"{host}/team/app:1"
        pushed = CliRunner().invoke(
            command, ["push", str(made.name), name, "--insecure"]
        )
        assert pushed.exit_code == 0, pushed.output
        yield Origin(
            host,
            home / "registry.log",
            parse_reference(name),
            made,
            manifest,
            b"".join(layout.parts(manifest.data)),
        )


def rings(
    stack: ExitStack, origin: Origin, tmp_path: Path, counts: list[int]
) -> list[Ring]:
    made = []
    for number, count in enumerate(counts):
        root = tmp_path / f"ring{number}"
        root.mkdir()
        keys: dict[str, Any] = {
            "origins": [f"http://{origin.host}"],
            "slice_bytes": UNIT,
        }
        made.append(stack.enter_context(ring(root, count, **keys)))
    return made


def read_as_hosts(
    build: Path, tmp_path: Path, origin: Origin, caches: list[str]
) -> None:
    """Have hosts get the metadata pack, and read all data."""
    access = RegistryAccess(insecure=True, via=tuple(caches))
    assert origin.manifest.data is not None
    mirror = {
        "kind": "oci",
        "registry": origin.host,
        "repository": origin.name.repository,
        "digest": origin.manifest.data.digest,
        "insecure": True,
        "via": caches,
    }
    for number in range(HOSTS):
        with open_repository(origin.name, access) as repository:
            repository.download(origin.manifest.pack, tmp_path / f"pack{number}")
        log = tmp_path / f"log{number}"
        with fetch_shell(build, log=log) as shell:
            source = shell.add(
                {"size": len(origin.data), "unit": UNIT, "mirrors": [mirror]}
            )
            step = 16 * UNIT
            for start in range(0, len(origin.data), step):
                length = min(step, len(origin.data) - start)
                answer = shell.read(source, start, length)
                assert answer.result == 0
                assert answer.data == origin.data[start : start + length]


@pytest.mark.parametrize("counts", [[3], [1, 1, 1]], ids=["ring", "caches"])
def test_after_it_hosts_cost_the_registry_nothing(
    sanitized_build: Path, tmp_path: Path, origin: Origin, counts: list[int]
) -> None:
    """Also where the caches are no ring, so that each has to be asked for its part."""
    with ExitStack() as stack:
        nodes = rings(stack, origin, tmp_path, counts)
        caches = [url for each in nodes for url in each.urls]
        words = ["warm", str(origin.name), "--insecure", "--json"]
        words += [word for url in caches for word in ("--site", url)]

        def warm() -> dict[str, object]:
            result = CliRunner().invoke(command, words, catch_exceptions=False)
            report: dict[str, object] = json.loads(result.stdout)
            return report

        report = warm()
        total = origin.manifest.pack.size + len(origin.data)
        assert report["asked_bytes"] == total
        # A store without an answer for half a second says "later", and has it then.
        hit = report["hit_bytes"]
        assert isinstance(hit, int) and hit < total // 2
        assert report["digest"] == origin.made.sealed

        before = origin.asked_for_blobs()
        gets = [one for one in before if one.startswith("GET ")]
        assert len(gets) >= UNITS
        read_as_hosts(sanitized_build, tmp_path, origin, caches)
        assert origin.asked_for_blobs() == before
        again = warm()
        assert again["hit_bytes"] == again["asked_bytes"] == total
        assert origin.asked_for_blobs() == before


def test_a_cache_with_wrong_bytes_is_named(tmp_path: Path, origin: Origin) -> None:
    with ExitStack() as stack:
        (nodes,) = rings(stack, origin, tmp_path, [1])
        access = RegistryAccess(insecure=True, via=tuple(nodes.urls))
        warm_image(origin.name, access)
        with open_repository(origin.name, access) as repository:
            assert look_up(origin.name, repository)[2] == origin.manifest
        place = 50 * UNIT
        for path in (tmp_path / "ring0" / "node0" / "cache").rglob("*"):
            stored = path.read_bytes() if path.is_file() else b""
            if (at := stored.find(origin.data[place : place + 4096])) >= 0:
                path.write_bytes(stored[:at] + b"!" + stored[at + 1 :])
        with pytest.raises(BtrfsUblkError) as refused:
            warm_image(origin.name, access)
        assert f"{nodes.urls[0]} has wrong bytes" in refused.value.message
        assert f"bytes {place} to {place + UNIT - 1} of" in refused.value.message


def test_a_cache_that_fails_ends_it(origin: Origin) -> None:
    with scripted_server(lambda _: response("502 Bad Gateway")) as broken:
        url = broken.url("").rstrip("/")
        access = RegistryAccess(insecure=True, via=(url,))
        with pytest.raises(BtrfsUblkError) as refused:
            warm_image(origin.name, access)
        assert f"by a cache: {url}: HTTP 502" in refused.value.message
    with pytest.raises(UsageError) as unnamed:
        warm_image(origin.name, RegistryAccess(insecure=True, via=()))
    assert "--site" in str(unnamed.value.hint)
