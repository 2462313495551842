"""Images as other builders make them: what containerd takes becomes a sealed image, and
an indexed one, with the tree that containerd unpacks."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from support import compressed
from support.lazy_images import GZIP, PLAIN, ZSTD, image_of
from support.trees import Member, directory, entry, link

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuildOptions, build_image
from btrfs_ublk.image.documents import INDEX, to_bytes
from btrfs_ublk.image.indexed import index_image
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.reference import LayoutName, Name
from btrfs_ublk.image.tree import check_layers, export_image
from btrfs_ublk.units import KIB

pytestmark = pytest.mark.usefixtures("sanitized_helpers", "temporary")
OPTIONS = BuildOptions(threads=1)
BIG = bytes(range(256)) * 64


def tar(*members: Member) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as file:
        for member in members:
            file.addfile(member, io.BytesIO(member.content))
    return made.getvalue()


def zipped(*tars: bytes) -> list[tuple[str, bytes, bytes]]:
    return [(GZIP, each, gzip.compress(each, 6, mtime=0)) for each in tars]


def tree(name: Name) -> dict[str, object]:
    """The last layer's, as an export has it: content, or what a link leads to."""
    out = io.BytesIO()
    export_image(name, RegistryAccess(), out)
    out.seek(0)
    found: dict[str, object] = {}
    with tarfile.open(fileobj=out) as file:
        for member in file:
            if member.isreg():
                data = file.extractfile(member)
                assert data is not None
                found[member.name] = data.read()
            elif member.issym() or member.islnk():
                found[member.name] = ("->", member.linkname)
            else:
                found[member.name] = oct(member.mode)
    found.pop(".", None)
    return found


def built(path: Path, layers: list[tuple[str, bytes, bytes]]) -> dict[str, object]:
    """Make both forms of an image, which have the same tree."""
    source = image_of(path / "source", layers)
    sealed = build_image(source, path / "sealed", OPTIONS).name
    assert check_layers(sealed, source, RegistryAccess()) == max(1, len(layers))
    return tree(sealed)


# ko and jib begin names with "/", Kaniko has "/" itself, Bazel has "./" and links.
KO = [directory("/"), directory("/ko-app/"), entry("/ko-app/app", BIG, mode=0o755)]
KANIKO = [directory("/"), directory("///etc"), entry("//etc/f", BIG)]
KANIKO += [link("/etc/again", "/etc/f", tarfile.LNKTYPE), link("/l", "../../etc")]


def test_names_begin_at_the_top(sparse_path: Path) -> None:
    upper = [entry("/etc/.wh.again"), entry("/l/new", b"n"), entry("/ko-app/../x", BIG)]
    assert built(sparse_path, zipped(tar(*KO), tar(*KANIKO), tar(*upper))) == {
        "ko-app": "0o755",
        "ko-app/app": BIG,
        "etc": "0o755",
        "etc/f": BIG,
        "etc/new": b"n",
        "l": ("->", "../../etc"),
        "x": BIG,
    }


ONE = tar(entry("one", BIG))
EMPTY = {
    "raw": (PLAIN, b"", b""),
    "raw, said to be gzip": (GZIP, b"", b""),
    "gzip": (GZIP, b"", gzip.compress(b"", mtime=0)),
    "zstd": (ZSTD, b"", compressed.zstd(b"")),
    "blocks of zeroes": (GZIP, bytes(KIB), gzip.compress(bytes(KIB), mtime=0)),
}


def test_layers_of_nothing(sparse_path: Path) -> None:
    """In front of another one, behind it, and alone."""
    empty = [*EMPTY.values()]
    layers = [*empty, *zipped(ONE), *empty]
    assert built(sparse_path, layers) == {"one": BIG}
    alone = sparse_path / "alone"
    alone.mkdir()
    assert built(alone, empty) == {}
    compressed_ones = [each for each in layers if each[0] != PLAIN]
    source = image_of(sparse_path / "compressed", compressed_ones)
    index = index_image(source, sparse_path / "index", OPTIONS)
    assert index.layers == len(compressed_ones)


def test_a_layer_that_ends_with_its_last_file(sparse_path: Path) -> None:
    """umoci insert: neither padding nor blocks of zeroes. The diff ID proves that this
    is all."""
    odd = BIG + b"tail"
    whole = tar(entry("one", BIG), entry("two", odd))
    for number, end in enumerate((len(odd), -(-len(odd) // 512) * 512)):
        path = sparse_path / str(number)
        path.mkdir()
        start = whole.index(b"ustar", 512 + len(BIG)) - 257 + 512
        cut = whole[: start + end]
        assert cut.endswith(b"tail") is (number == 0)
        form = (PLAIN, cut, cut) if number else (ZSTD, cut, compressed.zstd(cut))
        assert built(path, [form]) == {"one": BIG, "two": odd}
    source = image_of(path / "again", zipped(cut))
    assert index_image(source, path / "index", OPTIONS).layers == 1


@pytest.mark.parametrize("missing", [1, 511, 512, 600])
def test_a_layer_that_was_cut_off_before_it_was_digested(
    sparse_path: Path, missing: int
) -> None:
    """Go says "unexpected EOF": content is missing, whatever the diff ID says."""
    whole = tar(entry("one", BIG + b"tail"))
    cut = whole[: 512 + len(BIG) + 4 - missing]
    source = image_of(sparse_path / "source", zipped(cut))
    with pytest.raises(BtrfsUblkError, match="the tar is damaged.*runcated"):
        build_image(source, sparse_path / "sealed", OPTIONS)


def test_zeroes_behind_the_members_of_gzip(sparse_path: Path) -> None:
    parts = [ONE[:5000], ONE[5000:]]
    stored = b"".join(gzip.compress(part, mtime=0) for part in parts) + bytes(512)
    assert built(sparse_path, [(GZIP, ONE, stored)]) == {"one": BIG}
    index = index_image(
        LayoutName(sparse_path / "source", "app"), sparse_path / "index", OPTIONS
    )
    assert index.data_bytes >= len(BIG)


def test_an_index_that_does_not_say_its_platforms(sparse_path: Path) -> None:
    """Then the config says it: an image of another machine is not taken silently."""
    source = image_of(sparse_path / "source", zipped(ONE))
    layout = Layout.opened(source.path)
    raw = dict(layout.find("app").raw)
    raw.pop("annotations")
    document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [raw]}
    layout.tag(layout.add(INDEX, to_bytes(document)), "app")
    with pytest.raises(UsageError, match="has no image for linux/s390x") as refused:
        build_image(source, sparse_path / "no", OPTIONS, platform="linux/s390x")
    assert refused.value.hint and "linux/amd64" in refused.value.hint
    made = build_image(source, sparse_path / "yes", OPTIONS, platform="linux/amd64")
    assert tree(made.name) == {"one": BIG}
