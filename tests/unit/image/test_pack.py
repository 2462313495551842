"""Metadata packs: what is written is read, and what is wrong is refused."""

import hashlib
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from btrfs_ublk.content.digests import Digests
from btrfs_ublk.image import pack as packs
from btrfs_ublk.image.documents import digest_of
from btrfs_ublk.image.pack import (
    DATA_OFFSET,
    MAGIC,
    InvalidPackError,
    Layer,
    PackHeader,
    check_data,
    header_of,
    next_chain_id,
    read_header,
    unpack,
    write_pack,
)
from btrfs_ublk.units import GIB, KIB, MIB

DIFF = digest_of(b"a layer")
FSID = "6c1b2a52-7a0f-4a52-9f3c-3a8b0c5d7e11"


def packed(directory: Path, seed: Path, digests: Digests, **keys: Any) -> Path:
    header = header_of(
        seed,
        digests,
        **{
            "device_bytes": DATA_OFFSET + 16 * GIB,
            "fsid": FSID,
            "layers": [Layer(chain_id=DIFF, diff_id=DIFF, subvolume=256)],
            "config": {"architecture": "amd64"},
            **keys,
        },
    )
    path = directory / "pack"
    with open(path, "wb") as file:
        write_pack(file, header, seed, digests.units)
    return path


@given(
    blocks=st.dictionaries(
        st.integers(0, 3000), st.integers(0, 255), min_size=1, max_size=20
    ),
    units=st.integers(0, 12),
    tail=st.integers(0, 15),
)
@settings(max_examples=15, deadline=None)
def test_unpacking_gives_the_same(
    blocks: dict[int, int], units: int, tail: int
) -> None:
    size_bytes = units * 64 * KIB + (tail * 4096 if units else 0)
    digests = Digests(size_bytes, 64 * KIB, b"d" * 32 * -(-size_bytes // (64 * KIB)))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        seed = directory / "seed"
        with open(seed, "wb") as file:
            file.truncate(3001 * 4096)
            for number, byte in blocks.items():
                file.seek(number * 4096)
                file.write(bytes([byte]) * 4096)
        path = packed(directory, seed, digests)
        header, found = unpack(path, directory / "again")
        assert (directory / "again").read_bytes() == seed.read_bytes()
        assert found == digests and header == read_header(path)
        # Blocks of zeroes are not stored, whether they are holes or not.
        stored = sum(length for _, length in header.extents)
        assert stored == 4096 * sum(byte != 0 for byte in blocks.values())


def keys_of_a_pack(**changed: Any) -> dict[str, Any]:
    units = hashlib.sha256(b"unit").digest()
    return {
        "local_bytes": 2 * MIB,
        "device_bytes": DATA_OFFSET + MIB,
        "data_bytes": 64 * KIB,
        "extents": [[64 * KIB, 4096], [MIB, 8192]],
        "unit": 64 * KIB,
        "root": Digests(64 * KIB, 64 * KIB, units).root,
        "fsid": FSID,
        "layers": [{"chain_id": DIFF, "diff_id": DIFF, "subvolume": 256}],
        "config": {},
        **changed,
    }


def stream(keys: Any, *, rest: bytes | None = None) -> bytes:
    line = json.dumps(keys).encode() + b"\n"
    units = hashlib.sha256(b"unit").digest()
    return MAGIC + line + (b"m" * 12288 + units if rest is None else rest)


def written(directory: Path, content: bytes) -> Path:
    path = directory / "pack"
    path.write_bytes(zstandard.ZstdCompressor().compress(content))
    return path


def test_one_made_by_hand_is_accepted(tmp_path: Path) -> None:
    header, digests = unpack(
        written(tmp_path, stream(keys_of_a_pack())), tmp_path / "seed"
    )
    assert isinstance(header, PackHeader) and digests.root == header.root


SECOND = digest_of(b"another layer")
FIRST = (DIFF, DIFF, 256)


def layers(*each: tuple[str, str | None, int]) -> dict[str, Any]:
    names = ("chain_id", "diff_id", "subvolume")
    return {"layers": [dict(zip(names, one, strict=True)) for one in each]}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"local_bytes": -4096}, "local_bytes is -4096"),
        ({"local_bytes": 2 * MIB + 1}, "local_bytes is 2097153"),
        ({"device_bytes": 1 << 63}, "device_bytes is"),
        ({"device_bytes": DATA_OFFSET}, "do not fit on a device"),
        ({"data_bytes": 1 << 70}, "data_bytes is"),
        ({"extents": {}}, "no list of at most"),
        ({"extents": [[0, "4096"]]}, "is no extent"),
        ({"extents": [[-4096, 4096]]}, "is not behind 0"),
        ({"extents": [[4096, 0]]}, "is not behind 0"),
        ({"extents": [[1, 4096]]}, "is not behind 0"),
        ({"extents": [[MIB, 8192], [MIB + 4096, 4096]]}, "is not behind 1056768"),
        ({"extents": [[2 * MIB - 4096, 8192]]}, "within the local part"),
        ({"extents": [[4096, 1 << 62]]}, "within the local part"),
        ({"unit": 0}, "a unit cannot have 0 bytes"),
        ({"unit": 2 * MIB}, "a unit cannot have"),
        ({"root": "0" * 64}, "its digests have the root"),
        ({"fsid": "../../etc"}, "is no UUID"),
        ({"config": []}, "config is '[]'"),
        ({"layers": []}, "it has 0 layers"),
        ({"layers": [{"chain_id": DIFF}]}, "is no layer"),
        (layers(("x/../y", None, 256)), "chain_id 'x/../y'"),
        (layers((DIFF, DIFF, 5)), "subvolume 5"),
        (layers((SECOND, DIFF, 256)), "its diff IDs make"),
        (layers(FIRST, (SECOND, SECOND, 257)), "layer 1 has chain ID"),
        (
            layers(FIRST, (next_chain_id(DIFF, SECOND), SECOND, 256)),
            "or another layer's",
        ),
        (
            {
                "sources": [
                    {
                        "layer": DIFF,
                        "layer_bytes": 1,
                        "codec": "gzip",
                        "offset": offset,
                        "data_bytes": MIB,
                        "index_bytes": 256 * MIB,
                        "selection_bytes": 1,
                    }
                    for offset in (0, MIB)
                ]
            },
            "indexes and selections of 536870914 bytes, and the most is 536870912",
        ),
        ({"more": 1}, "has not the keys of a pack"),
    ],
)
def test_wrong_numbers_are_refused(
    tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    path = written(tmp_path, stream(keys_of_a_pack(**changed)))
    with pytest.raises(InvalidPackError) as refused:
        unpack(path, tmp_path / "seed")
    assert why in refused.value.message


def cut(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)[:-5]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: b"", "ends too early"),
        (lambda: b"no zstd", "no valid zstd"),
        (lambda: zstandard.compress(b"BTRFSUBLKPACX1\n{}\n"), "not begin as one"),
        (lambda: zstandard.compress(MAGIC + b"{}"), "its header has no end"),
        (lambda: zstandard.compress(MAGIC + b"[" * 10**6 + b"\n"), "is not JSON"),
        (lambda: zstandard.compress(MAGIC + b"{}\n"), "not the keys"),
        (lambda: cut(stream(keys_of_a_pack())), "no valid zstd|ends too early"),
        (
            lambda: zstandard.compress(stream(keys_of_a_pack(), rest=b"m" * 12288)),
            "ends too early",
        ),
        (
            lambda: zstandard.compress(stream(keys_of_a_pack()) + b"x"),
            "something follows",
        ),
    ],
)
def test_damaged_packs_are_refused(
    tmp_path: Path, make: Callable[[], bytes], why: str
) -> None:
    (tmp_path / "pack").write_bytes(make())
    with pytest.raises(InvalidPackError, match=why):
        unpack(tmp_path / "pack", tmp_path / "seed")


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """It says how much it is: 100 TiB of zeroes in a few bytes."""
    many = [[i * GIB, GIB - 4096] for i in range(500)]
    path = written(
        tmp_path, stream(keys_of_a_pack(local_bytes=DATA_OFFSET, extents=many))
    )
    with pytest.raises(InvalidPackError, match="unpacks to .* more than"):
        unpack(path, tmp_path / "seed")
    assert not (tmp_path / "seed").exists()


def test_a_header_without_an_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "_MAX_HEADER_BYTES", MIB)
    with pytest.raises(InvalidPackError, match="no end within 1048576 bytes"):
        read_header(written(tmp_path, MAGIC + b" " * 4 * MIB))


def test_a_window_larger_than_ours_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    made = io.BytesIO()
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with compressor.stream_writer(made, closefd=False) as out:
        out.write(stream(keys_of_a_pack()))
    (tmp_path / "pack").write_bytes(made.getvalue())
    with pytest.raises(InvalidPackError, match="no valid zstd"):
        read_header(tmp_path / "pack")


def test_a_manifest_has_to_tell_of_the_same_data(tmp_path: Path) -> None:
    header = read_header(written(tmp_path, stream(keys_of_a_pack())))
    check_data(header, header.data_bytes)
    with pytest.raises(InvalidPackError, match="bytes of data, and the manifest of 0"):
        check_data(header, 0)
