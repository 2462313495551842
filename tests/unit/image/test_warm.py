"""``btrfs-ublk image warm``: after it, hosts of a site cost the registry nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.images import UNIT, sealed_image
from support.lazy_images import stock_image
from support.needs import Need
from support.shells import fetch_shell
from support.sites import Ring, ring
from support.web_servers import NGINX, response, scripted_server

from btrfs_ublk.base.hosts import cache_status
from btrfs_ublk.cli.image import command
from btrfs_ublk.content.digests import Digests
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuiltImage
from btrfs_ublk.image.documents import Descriptor, InvalidImageError, SealedManifest
from btrfs_ublk.image.indexed import layer_blob, unit_ranges
from btrfs_ublk.image.pack import PackHeader, read_digests
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


def recorded(
    size: int, tmp_path: Path, root: str, *runs: list[int], unit: int = UNIT
) -> Path:
    """Write a trace of these runs of units."""
    lines: list[object] = [{"format": "btrfs-ublk trace", "version": 1}]
    source = {"size": size, "unit": unit, "root": root, "mirrors": []}
    lines += [{"source": 0} | source, *([0, *run, 0] for run in runs)]
    path = tmp_path / "trace"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@dataclass
class Indexed:
    name: Reference
    header: PackHeader
    digests: Digests
    #: Of each source, which range of its layer each unit needs.
    ranges: list[list[tuple[int, int]]]

    @property
    def layers(self) -> list[Descriptor]:
        return [layer_blob(source) for source in self.header.sources]

    def root(self, number: int) -> str:
        source = self.header.sources[number]
        return self.digests.part(source.offset, source.data_bytes).root


@pytest.fixture
def indexed(origin: Origin, tmp_path: Path) -> Indexed:
    """An indexed image in the registry, with layers by gzip and by zstd."""
    place, layout = f"{origin.host}/team/stock:1", tmp_path / "indexed"
    for words in (
        ["push", str(stock_image(tmp_path / "stock")), place],
        ["index", place, "-o", str(layout)],
        ["push", f"oci:{layout}", place],
    ):
        done = CliRunner().invoke(command, [*words, "--insecure"])
        assert done.exit_code == 0, done.output
    name = parse_reference(place)
    (tmp_path / "unpacked").mkdir()
    pack = tmp_path / "unpacked/pack"
    with open_repository(name, RegistryAccess(insecure=True)) as repository:
        repository.download(look_up(name, repository)[2].pack, pack)
    header, digests = read_digests(pack, pack.parent)
    assert len(header.sources) == 2
    ranges = [unit_ranges(header, pack.parent, number) for number in range(2)]
    return Indexed(name, header, digests, ranges)


def slices_of(ranges: list[tuple[int, int]]) -> set[int]:
    return {
        at // UNIT
        for start, end in ranges
        for at in range(start // UNIT * UNIT, end, UNIT)
    }


@pytest.mark.usefixtures("sanitized_helpers")
def test_what_a_trace_has_read_of_layers(
    tmp_path: Path, origin: Origin, indexed: Indexed
) -> None:
    """Units of an indexed image are warmed with what decoding them needs of a layer."""
    header, unit = indexed.header, indexed.header.unit
    counts = [source.data_bytes // unit for source in header.sources]
    assert [len(ranges) for ranges in indexed.ranges] == counts
    for layer, ranges in zip(indexed.layers, indexed.ranges, strict=True):
        assert all(0 <= start < end <= layer.size for start, end in ranges)
    wrong = replace(header.sources[0], layer_bytes=UNIT)
    header = replace(header, sources=(wrong, *header.sources[1:]))
    with pytest.raises(InvalidImageError, match="its index is of"):
        unit_ranges(header, tmp_path / "unpacked", 0)
    with ExitStack() as stack:
        (nodes,) = rings(stack, origin, tmp_path, [1])
        words = ["warm", str(indexed.name), "--insecure", "--site", nodes.urls[0]]

        def warm(number: int, *runs: list[int]) -> dict[str, int]:
            size, root = header.sources[number].data_bytes, indexed.root(number)
            path = recorded(size, tmp_path, root, *runs, unit=unit)
            argv = [*words, "--json", "--trace", str(path)]
            result = CliRunner().invoke(command, argv, catch_exceptions=False)
            report: dict[str, int] = json.loads(result.stdout)
            return report

        access = RegistryAccess(insecure=True)
        last = counts[0] - 1
        report = warm(0, [last, 1], [0, 1], [last, 5])
        with open_repository(indexed.name, access) as repository:
            pack = look_up(indexed.name, repository)[2].pack

            def status(number: int, at: int) -> str | None:
                layer, end = indexed.layers[number], (at + 1) * UNIT
                found = repository.range_of_cache(
                    nodes.urls[0], layer, at * UNIT, min(end, layer.size)
                )
                return cache_status(found[1])

            needed = slices_of([indexed.ranges[0][0], indexed.ranges[0][last]])
            size = indexed.layers[0].size
            total = sum(min(UNIT, size - at * UNIT) for at in needed)
            assert report["asked_bytes"] == pack.size + total
            others = slices_of([(0, size)]) - needed
            assert others and {status(0, at) for at in needed} == {"HIT"}
            assert "HIT" not in {status(0, at) for at in others}
            assert "HIT" not in {status(1, 0)}

            result = CliRunner().invoke(command, words, catch_exceptions=False)
            assert result.exit_code == 0
            for number, ranges in enumerate(indexed.ranges):
                assert {status(number, at) for at in slices_of(ranges)} == {"HIT"}
        again = warm(1, [0, counts[1]])
        assert again["hit_bytes"] == again["asked_bytes"]


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
