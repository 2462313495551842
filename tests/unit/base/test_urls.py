"""A signed URL's query is told to its server, and to nobody else."""

import stat
from pathlib import Path

import pytest

from btrfs_ublk.base.jsonfile import RecordFormat
from btrfs_ublk.base.urls import shown_text, shown_value
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.volume import VolumeFile

SECRET = "sentinel-5f1d02"
QUERY = f"?Expires=2&Signature={SECRET}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"at https://h/p{QUERY}, twice", "at https://h/p?[redacted] twice"),
        (f"'http://u:{SECRET}@h/p' of it", "'http://[redacted]@h/p' of it"),
        (f'{{"url": "s3:\\/\\/h\\/p{QUERY}"}}', '{"url": "s3:\\/\\/h\\/p?[redacted]"}'),
        ("https://h/p and what? that", "https://h/p and what? that"),
    ],
)
def test_what_is_shown_of_urls(text: str, shown: str) -> None:
    assert shown_text(text) == shown
    assert shown_text(shown) == shown
    assert shown_value({"a": [text, 1]}) == {"a": [shown, 1]}
    assert str(BtrfsUblkError(text, hint=text)) == f"{shown}\n  hint: {shown}"


def test_records_are_private(tmp_path: Path) -> None:
    form = RecordFormat(1, BtrfsUblkError, str)
    path = tmp_path / "record.json"
    # Of an older version, or what a killed writer has left.
    path.write_text("before")
    (tmp_path / ".record.json.new").write_text("half of it, and more than is written")
    form.write(path, {"url": "x"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert form.read(path) == {"url": "x"}
    (tmp_path / ".record.json.new").symlink_to(path)
    with pytest.raises(BtrfsUblkError, match="cannot write"):
        form.write(path, {})


def test_origin_is_shown_without_its_query() -> None:
    file = VolumeFile.parse(f"one=https://h/one{QUERY}")
    assert file.origin == "https://h/one?[redacted]"
    assert file.to_keys()["url"].endswith(QUERY)
