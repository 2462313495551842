"""Definitions of kept volumes: TOML there and back, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import GIB, MIB, TIB
from btrfs_ublk.volume import VolumeDefinition, VolumeFile, VolumeTree, parse_definition
from btrfs_ublk.volume.definition import read_definition
from btrfs_ublk.volume.entry import source_of

_WHOLE = """
size = "2T"
writable = "8G"
mount = "/srv/images"
front_end = "fuse"
queues = 3
depth = 7
cache = "/var/cache/images"
cache_max = "50G"
read_ahead = "1M"
deadline = 2.5
complete = "50M/s"

[[file]]
path = "a/big.bin"
url = "https://example.org/big?x=1"
digests = "/srv/big.digests"
unit = "64K"

[[file]]
path = "two"
source = { mirrors = [{ kind = "file", path = "/b" }, { kind = "pattern" }] }
"""

_SOURCES = {
    "http://h/x": {"kind": "http", "url": "http://h/x"},
    "/a/b": {"kind": "file", "path": "/a/b"},
    "file:///a/b%20c": {"kind": "file", "path": "/a/b c"},
    "s3://box/a/b?#": {"kind": "s3", "bucket": "box", "key": "a/b?#"},
    "oci://docker.io/library/x@sha256:ab": {
        "kind": "oci",
        "registry": "docker.io",
        "repository": "library/x",
        "digest": "sha256:ab",
    },
    '{"kind": "memset", "byte": 7, "size": 4096}': {
        "kind": "memset",
        "byte": 7,
        "size": 4096,
    },
}


def parse(text: str) -> VolumeDefinition:
    return parse_definition(text, where="here")


def test_every_key_is_read_and_written_back() -> None:
    found = parse(_WHOLE)
    assert found.size_bytes == 2 * TIB and found.writable_bytes == 8 * GIB
    assert found.mount == Path("/srv/images") and found.front_end == "fuse"
    assert (found.queues, found.depth) == (3, 7)
    assert found.cache == Path("/var/cache/images")
    assert found.cache_max_bytes == 50 * GIB and found.read_ahead_bytes == MIB
    assert found.deadline_s == 2.5 and found.complete == 50 * MIB
    first, second = found.files
    assert first.source["digests"] == {"path": "/srv/big.digests"}
    assert first.source["unit"] == 65536
    assert len(second.source["mirrors"]) == 2
    assert parse(found.to_toml()) == found


def test_any_text_is_written_back(tmp_path: Path) -> None:
    odd = 'q"\\\x7f\x01\u2028\t[[file]] = #ü\U0001f4a5'
    source = {"kind": "s3", "key": odd, "more": [1, 2.5, False, [], {odd: {}}]}
    made = VolumeDefinition(
        mount=Path("/mnt") / odd,
        via=("http://a:1", "http://b:2"),
        files=(VolumeFile(odd, source), VolumeFile("e", {"size": 0})),
        trees=(VolumeTree.parse("t=s3://b/p/"),),
    )
    path = tmp_path / "definition.toml"
    path.write_text(made.to_toml())
    assert read_definition(path) == made
    # In another form, and where "\n[[" begins no table.
    settings = replace(made, files=(), trees=())
    assert read_definition(path, files=False) == settings
    path.write_text('cache = """/a\n[[file]]"""\nfile = [{ path = "x", size = 0 }]\n')
    assert read_definition(path, files=False) == read_definition(path)


def test_an_empty_one_is_the_default_and_no_deadline_is_0() -> None:
    assert parse("") == VolumeDefinition()
    endless = VolumeDefinition(deadline_s=None)
    assert parse(endless.to_toml()) == endless


def test_a_key_of_an_earlier_version_changes_nothing() -> None:
    found = parse("realtime = true\nqueues = 3\n")
    assert found == VolumeDefinition(queues=3) and "realtime" not in found.to_toml()


@pytest.mark.parametrize("url", _SOURCES)
def test_sources(url: str) -> None:
    source = source_of(url)
    assert source == _SOURCES[url]
    entry = VolumeFile("x", source)
    assert VolumeFile.from_keys(entry.to_keys()) == entry


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("size = ", "here is not valid TOML"),
        ("sise = '1T'", "'sise' is unknown"),
        ("size = 5000", "not a positive multiple"),
        ("size = '1M'", "here: size 1M: a volume has 4M at least"),
        ("writable = '1M'", "here: writable 1M: btrfs needs 64M"),
        ("front_end = 'nbd'", "no front_end 'nbd'"),
        ("deadline = -1", "deadline -1 s: it is not from 0 to"),
        ("file = 3", "no list of tables"),
        ("[[file]]\npath = '../x'\nurl = '/x'", "no path of a file"),
        ("[[file]]\npath = '/x'\nurl = '/x'", "no path of a file"),
        ("[[file]]\npath = 'x'", "either url or source"),
        ("[[file]]\npath = 'x'\nsize = 0\nurl = '/x'", "size 0, and kind, path"),
        (
            "[[file]]\npath = 'x'\nsource = { kind = 'http', size = 0 }",
            "size 0, and kind",
        ),
        ("[[file]]\npath = 'x'\nurl = 'ftp://h/x'", "no source"),
        (
            "[[file]]\npath = 'x'\nurl = '/x'\n[[file]]\npath = './x'\nurl = '/y'",
            "two sources: /x and /y",
        ),
        (
            "[[file]]\npath = 'x/y/z'\nurl = '/x'\n[[file]]\npath = 'x'\nurl = '/y'",
            "'x/y/z' cannot be in 'x'",
        ),
    ],
)
def test_refusals(text: str, words: str) -> None:
    with pytest.raises(UsageError, match="here") as refused:
        parse(text)
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ('"size": null', "source of 'x': size is None"),
        ('"headers": {"a": [1, null]}', "headers: a is None"),
        ('"digests": {}', "digests of 'x' are {}"),
        ('"digests": {"path": "here"}', "digests of 'x' are {'path': 'here'}"),
        ('"digests": "/here"', "digests of 'x' are '/here'"),
    ],
)
def test_what_no_source_has(keys: str, words: str) -> None:
    """It could not be written down."""
    with pytest.raises(UsageError) as refused:
        VolumeFile.parse('x={"kind": "http", "url": "http://h/x", ' + keys + "}")
    assert words in refused.value.message
    with pytest.raises(UsageError, match="source of 'x': since is"):
        parse("[[file]]\npath = 'x'\nsource = { since = 2020-01-01 }")


def test_what_is_no_utf8(tmp_path: Path) -> None:
    """TOML could not hold it."""
    odd = "\udcff"
    for text in (f"{odd}=/x", f"x=/{odd}"):
        with pytest.raises(UsageError, match="no text in UTF-8"):
            VolumeFile.parse(text)
    with pytest.raises(UsageError, match="mount point .* no text in UTF-8"):
        VolumeDefinition(mount=Path("/", odd))
    (tmp_path / "v.toml").write_bytes(b"mount = '/\xe4'")
    with pytest.raises(UsageError, match=r"v.toml: no text in UTF-8 \(byte 10 is 0xe4"):
        read_definition(tmp_path / "v.toml")


def test_an_empty_file_has_a_size_and_nothing_else() -> None:
    made = parse("[[file]]\npath = 'x'\nsize = 0")
    assert made.files == (VolumeFile("x", {"size": 0}),)
    assert made.files[0].is_empty and "empty" in made.files[0].origin
    assert parse(made.to_toml()) == made
    assert parse("[[file]]\npath = 'x'\nsource = { size = 0 }") == made
    assert VolumeFile.parse('x={"size": 0}') == made.files[0]


def test_how_an_image_is_written() -> None:
    image = {"kind": "oci", "registry": "r:5000", "repository": "a/b"}
    digest = f"sha256:{'ab' * 32}"
    for name, more in (
        (":v1", {"tag": "v1"}),
        (f"@{digest}", {"digest": digest}),
        (f":v1@{digest}", {"tag": "v1", "digest": digest}),
    ):
        url = f"oci://r:5000/a/b{name}"
        assert source_of(url) == image | more
        assert VolumeFile("x", image | more).to_keys() == {"path": "x", "url": url}
    with pytest.raises(UsageError, match="no source"):
        source_of("oci://r:5000/a/b")
    tag, pinned, other = (
        VolumeFile.parse(f"x=oci://r/a:v1{more}")
        for more in ("", f"@{digest}", f"@sha256:{'cd' * 32}")
    )
    assert tag.has_tag and not pinned.has_tag
    assert tag.is_same_as(pinned) and pinned.is_same_as(tag)
    assert not pinned.is_same_as(other)
    assert pinned.is_same_as(VolumeFile.parse(f"x=oci://r/a@{digest}"))
    assert not tag.is_same_as(VolumeFile.parse(f"x=oci://r/a@{digest}"))
