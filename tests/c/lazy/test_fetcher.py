"""The fetcher, through fetch-shell in a sanitizer build, with local files."""

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
from support.shells import FetchShell
from support.waiting import wait_until

BLOCK = 4096
EIO = -errno.EIO


def file_source(path: Path, size: int, *, unit: int = 65536) -> dict[str, Any]:
    return {"size": size, "unit": unit, "kind": "file", "path": str(path)}


@pytest.fixture
def content(tmp_path: Path) -> tuple[Path, bytes]:
    data = random.Random(1).randbytes(1_234_567)
    path = tmp_path / "source"
    path.write_bytes(data)
    return path, data


def test_another_mirror_is_asked(
    sanitized_build: Path, content: tuple[Path, bytes], tmp_path: Path
) -> None:
    path, data = content
    (tmp_path / "short").write_bytes(data[:-1])
    mirrors = [
        {"kind": "file", "path": str(tmp_path / name)}
        for name in ("missing", "short", path.name)
    ]
    with FetchShell(sanitized_build, log=tmp_path / "log") as shell:
        source = shell.add({"size": len(data), "unit": 65536, "mirrors": mirrors})
        assert shell.read(source, 0, BLOCK).data == data[:BLOCK]
        failures = shell.stats()["failures"]
        assert (failures["gone"], failures["wrong_answer"]) == (1, 1)


def test_no_mirror_is_left(sanitized_build: Path, tmp_path: Path) -> None:
    with FetchShell(sanitized_build, log=tmp_path / "log") as shell:
        source = shell.add(file_source(tmp_path / "missing", 1 << 20))
        answer = shell.read(source, 0, BLOCK, deadline_s=120)
        assert answer.result == EIO and answer.ms < 60_000
        # Nothing is remembered: it is there now.
        (tmp_path / "missing").write_bytes(bytes(1 << 20))
        assert shell.read(source, 0, BLOCK).data == bytes(BLOCK)
    assert "missing" in (tmp_path / "log").read_text()


def test_a_read_without_a_deadline_waits(
    sanitized_build: Path, content: tuple[Path, bytes], tmp_path: Path
) -> None:
    path, data = content
    away = tmp_path / "away"
    path.rename(away)
    with FetchShell(sanitized_build, log=tmp_path / "log") as shell:
        source = shell.add(file_source(path, len(data)))
        number = shell.begin(source, 0, BLOCK, deadline_s=None)
        wait_until(lambda: shell.stats()["failures"]["gone"])
        assert shell.stats()["reads_waiting"] == 1
        away.rename(path)
        assert shell.finish()[number].data == data[:BLOCK]


def test_a_file_that_never_answers(
    sanitized_build: Path, content: tuple[Path, bytes], tmp_path: Path
) -> None:
    """A device is no source; and it must not be waited for either."""
    path, data = content
    os.mkfifo(tmp_path / "fifo")
    with FetchShell(sanitized_build, log=tmp_path / "log") as shell:
        source = shell.add(file_source(tmp_path / "fifo", len(data)))
        assert shell.read(source, 0, BLOCK, deadline_s=2).result == EIO


def test_what_is_waited_for_fails_at_the_end(
    sanitized_build: Path, tmp_path: Path
) -> None:
    with FetchShell(sanitized_build, log=tmp_path / "log") as shell:
        source = shell.add(file_source(tmp_path / "missing", 1 << 20))
        shell.begin(source, 0, BLOCK, deadline_s=None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"kind": "file", "path": "/x"}, '"size" is missing'),
        ({"size": 0, "kind": "file", "path": "/x"}, '"size" is 0'),
        ({"size": 1, "unit": 12288, "kind": "memset", "byte": 1}, "power of two"),
        ({"size": 1, "kind": "memset", "byte": 256}, "0 to 255"),
        ({"size": 1, "mirrors": []}, "1 to 16 mirrors"),
        ({"size": 1, "mirrors": [{"kind": "file"}]}, '"path" is missing'),
        ({"size": 1, "kind": "file", "path": "x"}, "must begin with /"),
        ({"size": 1, "kind": "file", "path": "/a\0b"}, "not JSON"),
        (
            {"size": 1 << 62, "kind": "file", "path": "/x", "file_offset": 1 << 62},
            "beyond what a file can hold",
        ),
        (
            {
                "size": 1,
                "mirrors": [{"kind": "memset", "byte": 1}, {"kind": "pattern"}],
            },
            "it must be the only one",
        ),
        ([], "must be a JSON object"),
    ],
)
def test_refused_sources(
    sanitized_build: Path, source: dict[str, Any], message: str
) -> None:
    with FetchShell(sanitized_build) as shell:
        assert message in shell.ask({"source": source})["error"]
